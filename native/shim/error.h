// Error codes and messages of the C functions.
#pragma once
#include <exception>
#include "bitport_shim.h"

namespace bitport {

// Stores the message for bitport_shim_error and prints it to stderr, as torch does for errors of its C functions:
// generated code only reports that a call failed.
AOTITorchError failed(AOTITorchError code, const char* function, const char* what) noexcept;

// Resolves the torch functions once; must come before anything else.
void link_once();

// Runs body, which returns null or the reason why the arguments are invalid.
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
