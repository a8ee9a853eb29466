#include "disk.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "team.h"

namespace dos {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kBlock = 4096, kRows = kBlock / (8 * kLanes);
constexpr uint64_t kSum = 0x9E3779B185EBCA87, kPlaces = 0xC2B2AE3D27D4EB4E, kMix = 0xD6E8FEB86659FD93;

// Compilers vectorise the loops over lanes. A block has no products, because older processors have no vectors of 64-bit
// products.
//
// In a block each lane adds up its words, and its sums so far, in which a word counts by its place. One changed word
// always changes the checksum: it changes the two sums by d and k * d, and kSum + k * kPlaces is odd; later operations
// are invertible. A word is folded first, else two changes of its highest bit could cancel in both.
uint64_t checksum(const std::byte* bytes, int64_t nbytes) {
  std::array<uint64_t, kLanes> lanes{};
  for (const std::byte* end = bytes + nbytes; bytes < end; bytes += kBlock) {
    uint64_t sums[kLanes] = {}, places[kLanes] = {};
    for (int64_t row = 0; row < kRows; ++row) {
      uint64_t words[kLanes];
      std::memcpy(words, bytes + row * sizeof words, sizeof words);
      for (int i = 0; i < kLanes; ++i) {
        sums[i] += words[i] ^ words[i] >> 32;
        places[i] += sums[i];
      }
    }
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t mixed = (lanes[i] ^ lanes[i] >> 29) * kMix;  // so that the order of blocks counts
      lanes[i] = mixed + sums[i] * kSum + places[i] * kPlaces;
    }
  }
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all = ((all ^ all >> 29) + lane) * kMix;
  return all;
}

// Returns 0, or errno; -1 where the file ends.
int move(bool write, const Request& request, int64_t& done) {
  while (done < request.nbytes) {
    std::byte* const address = request.address + done;
    const int64_t rest = request.nbytes - done, offset = request.offset + done;
    const ssize_t moved =
        write ? pwrite(request.fd, address, rest, offset) : pread(request.fd, address, rest, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    struct stat file;
    done += moved;
    // Direct I/O cannot continue where a file ends within a block: EINVAL would hide the reason.
    if (!write && moved < rest && !fstat(request.fd, &file) && file.st_size < request.offset + request.nbytes) return -1;
    if (moved == 0) return EIO;
  }
  return 0;
}

}  // namespace

Failure transfer(bool write, const Request* requests, int64_t count, int threads, uint64_t* checksums) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  Failure failure{-1, 0, 0};
  const auto share = [&] {
    for (int64_t i; (i = next++) < count;) {
      const Request& request = requests[i];
      if (write) checksums[i] = checksum(request.address, request.nbytes);
      int64_t done = 0;
      if (const int error = move(write, request, done)) {
        next = count;
        const std::lock_guard<std::mutex> lock(mutex);
        if (failure.request < 0) failure = {i, done, std::max(error, 0)};
        return;
      }
      if (!write) checksums[i] = checksum(request.address, request.nbytes);
    }
  };
  const auto call = [](const void* work, int, int) { (*static_cast<const decltype(share)*>(work))(); };
  run_on_team(static_cast<int>(std::clamp<int64_t>(count, 1, threads)), call, &share);
  return failure;
}

int64_t direct_alignment(int fd) {
  struct statfs system;
  if (!fstatfs(fd, &system) && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) return 0;
#if defined(STATX_DIOALIGN)
  struct statx file;
  if (!statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &file) && file.stx_mask & STATX_DIOALIGN) {
    return std::max(file.stx_dio_mem_align, file.stx_dio_offset_align);
  }
#endif
  return 1;
}

}  // namespace dos
