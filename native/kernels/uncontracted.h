// Include before anything else (functions with other options are not inlined). Every product and sum in the file is
// rounded separately, like a sequence of PyTorch ops; compilers for ARM would otherwise contract them to fused
// multiply-adds.
#pragma once
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
