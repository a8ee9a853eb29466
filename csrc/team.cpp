#include "team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dos {
namespace {

// Lets the other hardware thread of the core run.
void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr std::chrono::microseconds kPatience{200};

// Waits until `ended`, awake, and no longer than kPatience.
template <class F>
void stay_awake(const F& ended) {
  const auto asleep = std::chrono::steady_clock::now() + kPatience;
  while (!ended() && std::chrono::steady_clock::now() < asleep) {
    for (int i = 0; i < 64 && !ended(); ++i) rest();
  }
}

class Team {
 public:
  ~Team() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    started_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void keep_awake() { awake_ = true; }

  void run(int count, Share share, const void* work) {
    count = grow(count);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      share_ = share, work_ = work, count_ = count, running_ = count - 1, ++loop_;
    }
    started_.notify_all();
    share(work, 0, count);
    // The other threads began when they woke up, so they end a little later, but sooner than this thread would wake up.
    stay_awake([&] { return running_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  // Returns the number of threads now, this one included, but no more than wanted.
  int grow(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the interpreter's
    try {
      while (static_cast<int>(threads_.size()) + 1 < wanted) {
        const int index = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, index, loop = loop_.load()] { work(index, loop); });
      }
    } catch (const std::system_error&) {
      wanted = static_cast<int>(threads_.size()) + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return wanted;
  }

  void work(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (awake_) {
        lock.unlock();
        stay_awake([&] { return loop_.load(std::memory_order_acquire) != seen; });
        lock.lock();
      }
      // Not awake between loops of fewer threads: it would disturb those for which they leave the core.
      started_.wait(lock, [&] { return stopping_ || (loop_ != seen && index < count_); });
      if (stopping_) return;
      seen = loop_;
      const Share share = share_;
      const void* const data = work_;
      const int count = count_;
      lock.unlock();
      share(data, index, count);
      lock.lock();
      if (--running_ == 0) ended_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable started_, ended_;
  Share share_ = nullptr;
  const void* work_ = nullptr;
  int count_ = 0;
  std::atomic<int> running_{0};
  std::atomic<uint64_t> loop_{0};
  bool stopping_ = false;
  std::atomic<bool> awake_{false};
  std::vector<std::thread> threads_;
};

// The team of one thread. A forked child has none of the team's threads, and the state of its lock is not known: the
// child leaks the team as it is.
class Owner {
 public:
  ~Owner() {
    if (process_ == getpid()) delete team_;
  }

  Team& team() {
    if (process_ != getpid()) {
      process_ = getpid();
      team_ = new Team;
    }
    return *team_;
  }

 private:
  pid_t process_ = 0;
  Team* team_ = nullptr;
};

}  // namespace

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

namespace {

Team& team_of_thread() {
  thread_local Owner owner;
  return owner.team();
}

}  // namespace

void run_on_team(int count, Share share, const void* work) { team_of_thread().run(count, share, work); }

void keep_team_awake() { team_of_thread().keep_awake(); }

}  // namespace dos
