// Counters in memory shared by processes. Waiting for a counter spins for a moment, then sleeps.
#pragma once

#include <stdint.h>

#include <chrono>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// About the time of falling asleep and waking up.
constexpr auto kSpin = std::chrono::microseconds(50);

inline int64_t nanoseconds_left(std::chrono::steady_clock::time_point deadline) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now()).count();
}

// Sets *word and wakes its waiters. If they see the value, they also see everything written before, except for stores
// bypassing the caches.
inline void signal_word(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until *word has reached or passed value. Words wrap around. Returns false after `nanoseconds`.
inline bool await_word(uint32_t* word, uint32_t value, int64_t nanoseconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto deadline = begin + std::chrono::nanoseconds(nanoseconds);
  for (;;) {
    const uint32_t found = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    if ((int32_t)(found - value) >= 0) return true;
    const int64_t left = nanoseconds_left(deadline);
    if (left <= 0) return false;
    if (std::chrono::steady_clock::now() - begin < kSpin) {
      std::this_thread::yield();
      continue;
    }
#if defined(__linux__)
    const timespec wait = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT, found, &wait, nullptr, 0);
#else
    std::this_thread::sleep_for(kSpin);
#endif
  }
}
