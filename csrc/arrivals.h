// Work that waits for events of a device, and for what other threads tell of. Threads take it: of what has arrived that
// with the least rank.
//
// A device tells nobody that an event has ended. One of the threads that wait asks, without Python and its lock: a look
// with them would stop the thread that runs backward.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

namespace dos {

class Arrivals {
 public:
  using Query = int (*)(void*);
  static constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY, and HIP's; after an error whoever waits finds out

  // query: asks an event of the device; null: events count as ended.
  explicit Arrivals(Query query) : query_(query) {}

  // Hands over work that waits for these events, and for as many calls of `tell`. number: another one each time.
  void give(int64_t number, int64_t rank, const std::vector<uintptr_t>& events, int64_t untold) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({number, rank, untold, query_ ? events : std::vector<uintptr_t>()});
    change();
  }

  // Notes that one of what this work waits for has ended, or will end with these events.
  void tell(int64_t number, const std::vector<uintptr_t>& events) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(number);
    if (found == waiting_.end()) return;
    --found->untold;
    if (query_) found->events.insert(found->events.end(), events.begin(), events.end());
    change();
  }

  // Waits for the next work; returns its number, and how many were taken before. The number is -1 if no more follows.
  // After `fail` it takes what has not arrived, too, and the last work of all in any case: who takes it waits for it.
  std::pair<int64_t, int64_t> take() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int64_t looks = 0;;) {
      if (waiting_.empty() && closed_) return {-1, taken_};
      if (!waiting_.empty() && (failed_ || (closed_ && waiting_.size() == 1))) return pop(waiting_.begin());
      const uint64_t seen = changes_;
      const bool asks = !asking_;  // one thread is enough
      bool open = false;
      if (asks) {
        asking_ = true;
        open = look(looks++ % kAll == 0, lock);
        asking_ = false;
      }
      const auto next = first();
      if (next != waiting_.end()) return pop(next);
      if (changes_ != seen) continue;
      const auto changed = [&] { return changes_ != seen; };
      asking_ |= asks;
      if (open) {
        changed_.wait_for(lock, kPoll, changed);
      } else {
        changed_.wait(lock, changed);
      }
      if (asks) asking_ = false;
    }
  }

  // Notes that work which was taken has ended.
  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    change();
  }

  // No more work follows.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    change();
  }

  // Nobody need wait for what has not arrived.
  void fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    change();
  }

  // Waits until all work that was handed over has ended, but no longer than this; returns whether it has.
  bool wait(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return waiting_.empty() && ended_ == taken_; });
  }

  // How much work nobody has taken.
  int64_t waiting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(waiting_.size());
  }

 private:
  // A look ends after so many that have not arrived, as what was handed over behind them mostly arrives later; but the
  // first look for a turn, and then every so many, asks all.
  static constexpr int kMisses = 4, kAll = 16;
  static constexpr std::chrono::microseconds kPoll{100};

  struct Work {
    int64_t number, rank, untold;
    std::vector<uintptr_t> events;
    bool arrived() const { return untold == 0 && events.empty(); }
  };
  using Place = std::deque<Work>::iterator;

  Place find(int64_t number) {
    auto found = waiting_.begin();
    while (found != waiting_.end() && found->number != number) ++found;
    return found;
  }

  Place first() {
    auto found = waiting_.end();
    for (auto each = waiting_.begin(); each != waiting_.end(); ++each) {
      if (each->arrived() && (found == waiting_.end() || each->rank < found->rank)) found = each;
    }
    return found;
  }

  std::pair<int64_t, int64_t> pop(Place place) {
    const int64_t number = place->number;
    waiting_.erase(place);
    change();  // another thread may have to ask from now on
    return {number, taken_++};
  }

  // Asks events, without the mutex: others hand over meanwhile, and a query of a test takes Python's lock.
  // Returns whether any has not ended. Nobody else changes the events of work that waits for events alone.
  bool look(bool all, std::unique_lock<std::mutex>& lock) {
    std::vector<std::pair<int64_t, std::vector<uintptr_t>>> asked;
    for (const Work& each : waiting_) {
      if (each.untold == 0 && !each.events.empty()) asked.emplace_back(each.number, each.events);
    }
    if (asked.empty()) return false;
    lock.unlock();
    int misses = all ? std::numeric_limits<int>::max() : kMisses;
    for (auto& [number, events] : asked) {
      if (misses == 0) break;
      while (!events.empty() && query_(reinterpret_cast<void*>(events.back())) != kNotReady) events.pop_back();
      misses -= !events.empty();
    }
    lock.lock();
    bool open = false;
    for (auto& [number, events] : asked) {
      open |= !events.empty();
      const auto found = find(number);
      if (found != waiting_.end()) found->events = std::move(events);
    }
    return open;
  }

  void change() {
    ++changes_;
    changed_.notify_all();
  }

  const Query query_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  int64_t taken_ = 0, ended_ = 0;
  uint64_t changes_ = 0;
  bool asking_ = false, closed_ = false, failed_ = false;
};

}  // namespace dos
