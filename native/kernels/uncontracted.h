// Included before anything else (functions of other options are not inlined): in this file every product and sum is
// rounded by itself, as PyTorch's ops do it one after another. Compilers for ARM otherwise make one of both.
#pragma once
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
