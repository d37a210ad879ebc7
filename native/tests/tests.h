// The tests that kernels_test runs; the first failed assertion exits.
#pragma once
#include <cstdint>

void try_refusals();                              // refusals.cpp
void try_scales_that_are_none();                  // products.cpp
void try_rows_that_are_not_there();               // products.cpp
void try_weight(int64_t number, uint64_t seed);   // products.cpp: one random weight in all operations
void try_moments_that_are_none();                 // step.cpp
void try_rows_alike();                            // rows.cpp
void try_crc32(uint64_t seed);                    // crc32.cpp
void try_threads(uint64_t seed);                  // threads.cpp
void try_quantize(int64_t number, uint64_t seed);   // quantize.cpp: one random weight and format
void try_attention(int64_t number, uint64_t seed);   // attention.cpp: random keys, values and queries
void try_attention_refusals();
