// Work of several threads that runs one at a time, in a given order, on the thread that serves.
//
// Between two of them neither Python nor its lock is needed: each thread hands its work over ahead of time and sleeps
// until it has run. One thread runs all, so that one team of threads stays warm.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

namespace dos {

class Order {
 public:
  struct Times {  // seconds of CLOCK_MONOTONIC, the clock of Python's time.perf_counter
    double start = 0, end = 0;
  };

  // Hands `work` over and waits until it has run, after all places before this one, which it has left then.
  // Returns false if it has not run, because of `stop`; then the place is not left. Throws what the work throws.
  template <class F>
  bool run(int64_t place, const F& work, Times* times) {
    Work given{[](const void* work) { (*static_cast<const F*>(work))(); }, &work};
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) return false;
    waiting_[place] = &given;
    if (due_ > 0 && lasted_ > 0) lead_ = std::max(lead_, now() - due_);
    due_ = 0;
    change();
    changed_.wait(lock, [&] { return given.ended; });
    if (given.error) std::rethrow_exception(given.error);
    *times = given.times;
    return given.ran;
  }

  // Runs all work in its order, until `close`.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closed_) {
      const auto found = waiting_.find(next_);
      if (found == waiting_.end()) {
        wait(lock);
        continue;
      }
      Work& work = *found->second;
      waiting_.erase(found);
      begin();
      work.times.start = started_ = now();
      if (watchers_ > 0) change();
      lock.unlock();
      try {
        work.call(work.data);
      } catch (...) {
        work.error = std::current_exception();
      }
      work.times.end = now();
      lock.lock();
      lasted_ = work.times.end - work.times.start;
      if (!work.error) next();
      work.ran = work.ended = true;
      change();
    }
  }

  // Waits until all places before this one were left.
  void enter(int64_t place) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return next_ >= place; });
    begin();
  }

  // Waits until any place was entered, or its work has begun, but no longer than this.
  void await_begin(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return begun_ || stopped_; });
  }

  // Waits as `enter`, and leaves the place, if that has not happened yet.
  void leave(int64_t place) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return next_ >= place; });
    if (next_ > place) return;
    next();
    change();
  }

  // Waits until it is time to hand over what follows this place: a part of its time, and the longest that it took to hand
  // work over, before it ends if it lasts as long as the last one did; or until it was left. Who decides then what
  // follows knows what has arrived meanwhile.
  void await_end(int64_t place) {
    std::unique_lock<std::mutex> lock(mutex_);
    due_ = now();
    ++watchers_;
    while (lasted_ > 0 && next_ <= place && !stopped_) {
      const uint64_t seen = changes_;
      const auto changed = [&] { return changes_ != seen; };
      if (next_ < place || started_ == 0) {
        changed_.wait(lock, changed);
        due_ = now();
        continue;
      }
      const double due = started_ + lasted_ * kAwaited - lead_;
      if (due <= now()) break;
      due_ = due;
      changed_.wait_for(lock, std::chrono::duration<double>(due - now()), changed);
    }
    --watchers_;
  }

  // Whether `enter` would not wait.
  bool reached(int64_t place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return next_ >= place;
  }

  // Lets no more work begin.
  void stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (const auto& [place, work] : waiting_) work->ended = true;
    waiting_.clear();
    change();
  }

  // Ends `serve`. Nobody may wait for work.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    change();
  }

 private:
  static constexpr double kAwaited = 0.75;  // copies beside it change how long it takes, and threads wake up late

  struct Work {
    void (*call)(const void*);
    const void* data;
    Times times{};
    std::exception_ptr error{};
    bool ran = false, ended = false;
  };

  void begin() {
    if (begun_) return;
    begun_ = true;
    change();
  }

  void next() {
    ++next_;
    started_ = 0;
  }

  void change() {
    changes_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
  }

  // Waits for a change: awake for a moment, because to wake up would take longer than what is missing mostly takes.
  void wait(std::unique_lock<std::mutex>& lock) {
    const uint64_t seen = changes_.load(std::memory_order_acquire);
    lock.unlock();
    const auto asleep = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    while (changes_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < asleep) {
      std::this_thread::yield();
    }
    lock.lock();
    changed_.wait(lock, [&] { return changes_.load(std::memory_order_acquire) != seen; });
  }

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Work*> waiting_;
  int64_t next_ = 0, watchers_ = 0;
  double started_ = 0, lasted_ = 0;  // of the work at the next place, if it has begun; of the last work
  double due_ = 0, lead_ = 0;        // when somebody was to hand over the next work; the longest that it took since
  bool stopped_ = false, closed_ = false, begun_ = false;
  std::atomic<uint64_t> changes_{0};
};

}  // namespace dos
