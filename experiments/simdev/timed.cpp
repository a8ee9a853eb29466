// A simulation by itself, for who asks what would be at which time; no torch. See timed.h.
#include "timed.h"

namespace {
struct Asked {
  timed::Simulation simulation;
  std::vector<timed::MomentPtr> moments;
};
int keep(Asked* asked, timed::MomentPtr moment) {
  asked->moments.push_back(std::move(moment));
  return (int)asked->moments.size() - 1;
}
}  // namespace

extern "C" {
// As timed::Simulation's.
Asked* timed_new(const double* figures, int count) { return new Asked{{figures, count}, {}}; }
void timed_delete(Asked* asked) { delete asked; }
void timed_copy(Asked* asked, int stream, int link, double bytes) {
  asked->simulation.copy(stream, (timed::Link)link, bytes);
}
void timed_compute(Asked* asked, int stream, double seconds) { asked->simulation.compute(stream, seconds); }
int timed_mark(Asked* asked, int stream) { return keep(asked, asked->simulation.mark(stream)); }
void timed_wait(Asked* asked, int stream, int moment) { asked->simulation.wait(stream, asked->moments[moment]); }
int timed_update(Asked* asked, double parameters, double rate, double traffic, int threads) {
  return keep(asked, asked->simulation.update(parameters, rate, traffic, threads));
}
void timed_advance(Asked* asked, double now) { asked->simulation.advance(now); }
double timed_at(Asked* asked, int moment) { return asked->moments[moment]->at; }
}
