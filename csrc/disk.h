// Positioned reads and writes by a few threads, with a checksum of each request.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dos {

// Memory and a run of a file. Where the file was opened with O_DIRECT, all three are multiples of its alignment.
struct Request {
  int fd;
  int64_t offset;
  std::byte* address;
  int64_t nbytes;  // a multiple of 4096
};

// The first request that failed, -1 if none, the number of its bytes done, and errno, or 0 where a file ended.
struct Failure {
  int64_t request;
  int64_t done;
  int error;
};

// Reads or writes `count` requests on up to `threads` threads. Threads take them in order, and begin none after one has
// failed. checksums[i] is the checksum of the bytes of request i. The memory must not change meanwhile.
Failure transfer(bool write, const Request* requests, int64_t count, int threads, uint64_t* checksums);

// Returns the alignment of offsets, sizes and addresses of direct I/O on this file, in bytes: 1 where the system does
// not tell, 0 where the file is in memory or cannot be read directly.
int64_t direct_alignment(int fd);

}  // namespace dos
