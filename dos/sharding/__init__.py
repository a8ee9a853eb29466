"""Parameters that are divided over ranks: DTensors, their meshes, FSDP2 and DistributedDataParallel."""
