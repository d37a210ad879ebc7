// Codes and texts at the C border.
#pragma once
#include <exception>
#include "bitport_shim.h"

namespace bitport {

// Remembers the text for bitport_shim_error, and says it on standard error, as torch does with errors of its own C
// functions: generated code passes on no more than that a call failed.
AOTITorchError failed(AOTITorchError code, const char* function, const char* what) noexcept;

// Before anything else: the functions of torch, once.
void link_once();

// Runs body, which gives null or why the arguments are wrong.
template <class Body>
AOTITorchError guarded(const char* function, const Body& body) noexcept {
  try {
    link_once();
    const char* reason = body();
    return reason ? failed(BITPORT_INVALID_ARGUMENT, function, reason) : BITPORT_SUCCESS;
  } catch (const std::exception& error) {
    return failed(BITPORT_FAILURE, function, error.what());
  } catch (...) {
    return failed(BITPORT_FAILURE, function, "an exception of unknown type");
  }
}

}  // namespace bitport
