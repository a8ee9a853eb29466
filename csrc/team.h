// Threads that share a loop with the thread that calls them, and sleep between loops.
//
// A thread that has run a parallel region of OpenMP leaves workers that spin for milliseconds. If another thread opens
// regions, they compete for the cores: after an update on a thread of ours, steps of AdamW(fused=True) on the main one
// took four to eight times as long. So threads of ours use a team that sleeps. On the main thread OpenMP is better:
// torch and this code share its spinning workers.
#pragma once

namespace dos {

using Share = void (*)(const void* work, int index, int count);

bool on_main_thread();

// Calls share(work, index, count) for each index below count, index 0 on this thread. If the system starts fewer
// threads, `count` is smaller.
void run_on_team(int count, Share share, const void* work);

// Lets the threads that this thread calls sleep only a fifth of a millisecond after a loop, from now on: to wake up takes
// them a tenth of one. For loops that follow each other at once, or much later.
void keep_team_awake();

}  // namespace dos
