// The work of an accelerator and of the CPU lane as arithmetic over time: nothing runs, and no thread is needed.
// Whoever asks moves the time on, to his own clock; what ended meanwhile has ended at its own time, not at that.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

namespace timed {
constexpr double NEVER = std::numeric_limits<double>::infinity();
enum Link { H2D, D2H, LINKS };

struct Moment {
  bool done = false;
  double at = NEVER;
};
using MomentPtr = std::shared_ptr<Moment>;

// Rates in bytes per second. alone: of a link while the other is idle; duplex: while it is not. total: of host memory.
// weights: of H2D, D2H and the CPU, by which host memory is divided where they want more than the total.
// beside: of H2D at least, while nothing goes D2H: the CPU keeps its rate then.
struct Machine {
  double alone[LINKS], duplex[LINKS], weights[LINKS + 1], total, beside;
};
constexpr int FIGURES = sizeof(Machine) / sizeof(double);

// What each of several gets of a total, in proportion to weight x demand, and none more than its demand.
inline std::vector<double> divided(const std::vector<double>& demands, const std::vector<double>& weights,
                                   double total) {
  std::vector<double> found(demands.size(), 0.0);
  std::vector<size_t> open;
  for (size_t i = 0; i < demands.size(); ++i)
    if (demands[i] > 0) open.push_back(i);
  for (bool changed = true; changed && !open.empty();) {
    changed = false;
    double sum = 0;
    for (size_t i : open) sum += weights[i] * demands[i];
    for (size_t i : open) {
      double share = total * weights[i] * demands[i] / sum;
      if (share < demands[i] * (1 - 1e-12)) continue;
      found[i] = demands[i], total -= demands[i], changed = true;
    }
    std::erase_if(open, [&](size_t i) { return found[i] > 0; });
    if (!changed)
      for (size_t i : open) found[i] = total * weights[i] * demands[i] / sum;
  }
  return found;
}

class Simulation {
 public:
  // figures: of the machine by the number of threads that update on the CPU, from 0 on; count: of these numbers.
  Simulation(const double* figures, int count) : machines(count) {
    std::memcpy(machines.data(), figures, count * sizeof(Machine));
  }

  // Queue work of a stream. A copy is of bytes across a link; compute lasts for seconds where nothing else computes.
  void copy(int stream, Link link, double bytes) { put(stream, {Item::COPY, link, bytes, nullptr}); }
  void compute(int stream, double seconds) { put(stream, {Item::COMPUTE, LINKS, seconds, nullptr}); }
  void wait(int stream, MomentPtr moment) { put(stream, {Item::WAIT, LINKS, 0, std::move(moment)}); }
  MomentPtr mark(int stream) {
    auto moment = std::make_shared<Moment>();
    put(stream, {Item::MARK, LINKS, 0, moment});
    return moment;
  }
  // Begin an update on the CPU of so many parameters a second if alone, with so many bytes each of host memory.
  MomentPtr update(double parameters, double rate, double traffic, int threads) {
    updates.push_back({parameters, rate, traffic, threads, std::make_shared<Moment>()});
    return updates.back().moment;
  }
  bool idle(int stream) { return streams[stream].items.empty(); }
  size_t updating() const { return updates.size(); }

  // Let the time be `now`, which never goes back.
  void advance(double now) {
    for (;;) {
      settle();
      pick();
      Rates rates = speeds();
      double next = soonest(rates);
      double until = std::min(next, std::max(now, time));
      progress(rates, until - time, next <= until);
      time = until;
      if (next > until) return;
    }
  }
  // When the next work ends if nothing is added; NEVER if none goes on. After `advance`.
  double next() { return soonest(speeds()); }
  double time = 0;

 private:
  struct Item {
    enum Kind { COPY, COMPUTE, MARK, WAIT } kind;
    Link link;
    double left;
    MomentPtr moment;
  };
  struct Stream {
    std::deque<Item> items;
    double ready = NEVER;  // since when the copy at its head could run
  };
  struct Update {
    double left, rate, traffic;
    int threads;
    MomentPtr moment;
  };
  struct Rates {
    double links[LINKS] = {0, 0}, compute = 0;
    std::vector<double> updates;
  };

  std::vector<Machine> machines;
  std::map<int, Stream> streams;
  std::vector<Update> updates;
  int serving[LINKS] = {-1, -1};  // the stream of the copy that runs
  int last[LINKS] = {-1, -1};     // and of the one before

  void put(int stream, Item item) { streams[stream].items.push_back(std::move(item)); }

  static void reach(const MomentPtr& moment, double at) { moment->done = true, moment->at = at; }

  // Pass marks, and waits that are over; note copies that can run.
  void settle() {
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& [id, stream] : streams) {
        while (!stream.items.empty()) {
          Item& head = stream.items.front();
          if (head.kind == Item::MARK) {
            reach(head.moment, time);
          } else if (head.kind != Item::WAIT || !head.moment->done) {
            break;
          }
          stream.items.pop_front();
          changed = true;
        }
        bool copies = !stream.items.empty() && stream.items.front().kind == Item::COPY;
        if (copies && stream.ready == NEVER) stream.ready = time;
        if (!copies) stream.ready = NEVER;
      }
    }
  }
  // An engine stays with its stream while that has a copy ready; else it takes the copy that has been ready longest.
  void pick() {
    for (int link = 0; link < LINKS; ++link) {
      if (serving[link] >= 0) continue;
      double longest = NEVER;
      for (auto& [id, stream] : streams) {
        if (stream.ready == NEVER || stream.items.front().link != link) continue;
        double since = id == last[link] ? -1 : stream.ready;
        if (since < longest) longest = since, serving[link] = id;
      }
    }
  }
  Rates speeds() {
    Rates rates;
    std::vector<double> demands, weights;
    bool both = serving[H2D] >= 0 && serving[D2H] >= 0;
    int threads = 0;
    for (auto& each : updates) threads += each.threads;
    const Machine& machine = machines[std::min<size_t>(threads, machines.size() - 1)];
    double updated = 0;
    for (int link = 0; link < LINKS; ++link) {
      demands.push_back(serving[link] < 0 ? 0 : (both ? machine.duplex : machine.alone)[link]);
      weights.push_back(machine.weights[link]);
    }
    for (auto& each : updates) {
      demands.push_back(each.rate * each.traffic);
      weights.push_back(machine.weights[LINKS]);
      updated += demands.back();
    }
    auto shares = divided(demands, weights, machine.total);
    if (updated > 0 && serving[D2H] < 0) {
      shares = demands;
      shares[H2D] = std::min(demands[H2D], std::max(machine.beside, machine.total - updated));
    }
    for (int link = 0; link < LINKS; ++link) rates.links[link] = shares[link];
    for (size_t i = 0; i < updates.size(); ++i) rates.updates.push_back(shares[LINKS + i] / updates[i].traffic);
    int computing = 0;
    for (auto& [id, stream] : streams) computing += computes(stream);
    if (computing) rates.compute = 1.0 / computing;  // kernels of several streams share the device
    return rates;
  }
  static bool computes(const Stream& stream) {
    return !stream.items.empty() && stream.items.front().kind == Item::COMPUTE;
  }
  // The work that goes on, with its rate: visit(left, rate, end).
  template <class F>
  void each(const Rates& rates, F visit) {
    for (int link = 0; link < LINKS; ++link)
      if (serving[link] >= 0) {
        auto& stream = streams[serving[link]];
        visit(stream.items.front().left, rates.links[link], [this, &stream, link] {
          stream.items.pop_front(), stream.ready = NEVER;
          last[link] = serving[link], serving[link] = -1;
        });
      }
    for (auto& [id, stream] : streams)
      if (computes(stream)) visit(stream.items.front().left, rates.compute, [&stream] { stream.items.pop_front(); });
    for (size_t i = 0; i < rates.updates.size(); ++i)
      visit(updates[i].left, rates.updates[i], [this, i] { reach(updates[i].moment, NEVER); });
  }
  double soonest(const Rates& rates) {
    double least = NEVER;
    each(rates, [&](double left, double rate, auto) { least = std::min(least, time + left / rate); });
    return least;
  }
  void progress(const Rates& rates, double seconds, bool ends) {
    double until = time + seconds;
    std::vector<std::function<void()>> over;
    each(rates, [&](double& left, double rate, auto end) {
      if (ends && time + left / rate <= until + 1e-12) over.push_back(end);
      left = std::max(0.0, left - rate * seconds);
    });
    for (auto& end : over) end();  // after all: what comes next at the head of a stream begins now
    for (auto& update : updates)
      if (update.moment->done) update.moment->at = until;
    std::erase_if(updates, [](const Update& update) { return update.moment->done; });
  }
};
}  // namespace timed
