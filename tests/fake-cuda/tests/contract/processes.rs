//! What takes a process of its own: crashes, forks, the environment.

use super::*;
use std::env;
use std::process::{Command, ExitStatus};

/// Runs a test of this binary, one that is ignored otherwise, in a process of its own.
fn in_a_process(test: &str, environment: &[(&str, &str)]) -> ExitStatus {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.envs(environment.iter().copied()).output().unwrap().status
}

#[test]
fn ordinary_code_that_touches_device_memory_crashes_unless_it_is_open() {
    use std::os::unix::process::ExitStatusExt;
    let touched = in_a_process("processes::touch", &[]);
    assert_eq!(touched.signal(), Some(nix::libc::SIGSEGV));
    assert!(in_a_process("processes::touch", &[("FAKE_CUDA_OPEN", "1")]).success());
}

#[test]
#[ignore = "crashes: in_a_process runs it"]
fn touch() {
    let _fake = Fake::load();
    let device = DeviceBuffer::new(0, &[6; 8]);
    let byte: *const u8 = std::ptr::with_exposed_provenance(device.ptr() as usize);
    // SAFETY: it is mapped; without access it is a signal that ends the process.
    assert_eq!(unsafe { byte.read_volatile() }, 6);
}

#[test]
fn the_child_of_a_fork_has_no_driver() {
    assert!(in_a_process("processes::fork", &[]).success());
}

#[test]
#[ignore = "forks: in_a_process runs it"]
fn fork() {
    let _fake = Fake::load();
    let mut count = 0;
    let count = &raw mut count;
    // SAFETY: the child only calls the driver and exits.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let again = cuda!(cuInit(0 => c_uint) -> c_int);
            let code = cuda!(cuDeviceGetCount(count => *mut c_int) -> c_int);
            // SAFETY: ends the child at once.
            unsafe {
                nix::libc::_exit((again != NOT_INITIALIZED || code != NOT_INITIALIZED).into())
            }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
}

#[test]
fn the_environment_sets_devices_memory_failures_and_the_report() {
    let report = env::temp_dir().join(format!("fake-cuda-{}.json", std::process::id()));
    let environment = [
        ("FAKE_CUDA_DEVICES", "3"),
        ("FAKE_CUDA_DRIVER_VERSION", "13000"),
        ("FAKE_CUDA_MEMORY", "4096"),
        ("FAKE_CUDA_FAIL", "cuDeviceGetCount:1:999,cuMemAlloc_v2:0:2"),
        ("FAKE_CUDA_REPORT", report.to_str().unwrap()),
    ];
    assert!(in_a_process("processes::environment", &environment).success());
    let line = std::fs::read_to_string(&report).unwrap();
    std::fs::remove_file(&report).unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["violations"][0], "event recorded on a stream being captured");
    assert_eq!((&line["live"]["contexts"], &line["live"]["events"]), (&2.into(), &1.into()));
    assert_eq!(line["calls"]["cuDeviceGetCount"], 3);
}

#[test]
#[ignore = "needs an environment: in_a_process sets it"]
fn environment() {
    assert!(!symbol(c"cuInit").is_null()); // loads the library, and no `Fake`: nothing is reset
    let (mut count, mut version, mut device) = (0, 0, 0u64);
    let mut devices = || cuda!(cuDeviceGetCount(&mut count => *mut c_int) -> c_int);
    assert_eq!(devices(), NOT_INITIALIZED);
    assert_eq!(cuda!(cuInit(0 => c_uint) -> c_int), OK);
    assert_eq!((devices(), devices()), (999, OK));
    assert_eq!(count, 3);
    assert_eq!(cuda!(cuDriverGetVersion(&mut version => *mut c_int) -> c_int), OK);
    assert_eq!(version, 13000);
    std::mem::forget(Context::retain(2));
    in_context(|| {
        let mut allocate =
            |len: usize| cuda!(cuMemAlloc_v2(&mut device => *mut u64, len => usize) -> c_int);
        assert_eq!([allocate(1), allocate(4096), allocate(1)], [OUT_OF_MEMORY, OK, OUT_OF_MEMORY]);
        let stream = std::mem::ManuallyDrop::new(Stream::new(0)); // keeps the context
        stream.begin_capture();
        assert_eq!(record(event(0), stream.handle()), OK);
    });
}
