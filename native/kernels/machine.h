// The architecture whose instruction sets are compiled, without one only the scalar code; and how functions are inlined.
#pragma once

#if defined(_WIN32) && !defined(__clang__)
#error "on Windows the kernels are compiled by clang++: g++ does not align vectors on the stack there (GCC bug 54412)"
#endif

#if defined(__x86_64__) && (defined(__linux__) || defined(_WIN32))
#define BITPORT_X86 1
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && !defined(__AARCH64EB__)
#define BITPORT_ARM 1
#endif

// For functions that become a part of their callers, and are vectorized for the instruction sets of these.
#define BITPORT_INLINE __attribute__((always_inline)) inline
