//! A `libcuda.so` over host memory: the CUDA driver API as far as ringstow uses it, for tests on
//! machines without a GPU. Never linked; loaded at run time in the place of the real driver.
//!
//! # What it promises
//! - Streams are asynchronous: an operation runs later, on the stream's own thread, in the order of
//!   the stream. Host memory is read and written then and not before. An event completes when that
//!   thread gets to it; `cuStreamWaitEvent` waits for what was recorded at the time of the call.
//! - A copy from or to registered host memory returns at once, one from or to pageable memory when
//!   it is done, one over the edge of a registration is refused.
//! - Device memory is of its own: ordinary code that touches it crashes (unless `FAKE_CUDA_OPEN=1`).
//! - What a real driver leaves undefined, or does only slowly, is noted as a *violation*: copies
//!   outside of an allocation, memory freed or unregistered while a copy uses it, calls that break
//!   another thread's capture, a host function that calls the driver.
//! - Failures can be injected into every function, and into the execution of a copy (`control`).
//!
//! # What it does not model
//! - Kernels, graphs (a captured operation is forgotten), memory pools, managed memory, arrays,
//!   peer access (any device reaches any memory), contexts other than primary ones, priorities.
//! - How fast a device is, and that a copy may be seen half done. `fake_cuda_slow` only delays.
//! - New device memory holds zeros. A stale handle gives an error; a real driver may crash.
//! - Host memory that is unmapped while registered: the worker that copies it crashes.
//!
//! # Environment, read at the first call of the driver
//! | variable | default | |
//! |---|---|---|
//! | `FAKE_CUDA_DEVICES` | 1 | number of devices; 0: `cuInit` says that there is none |
//! | `FAKE_CUDA_DRIVER_VERSION` | 12080 | what `cuDriverGetVersion` says |
//! | `FAKE_CUDA_MEMORY` | 8589934592 | bytes a device |
//! | `FAKE_CUDA_OPEN` | | `1`: ordinary code may touch device memory |
//! | `FAKE_CUDA_FAIL` | | `function:after:code[,...]`, as `fake_cuda_fail` |
//! | `FAKE_CUDA_REPORT` | | a file; a JSON line is appended at exit, see [`control`] |
#![allow(unsafe_code)] // it is a C library: its callers hand it addresses

mod abi;
mod api;
mod capture;
mod context;
pub mod control;
mod driver;
mod event;
mod memory;
mod stream;
mod worker;
