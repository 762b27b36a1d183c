//! GPUs: the driver, each GPU, whether host memory can be pinned for it, how fast it copies.

use crate::doctor::Check;
use crate::sys::dir::try_entries;
use crate::sys::file::is_denied;
use std::path::{Path, PathBuf};

const NAME: &str = "GPU";

/// No GPU at all is as it should be: most machines have none.
pub(crate) fn checks() -> Vec<Check> {
    look(&Nodes::of(Path::new("/dev")))
}

#[cfg(not(feature = "cuda"))]
fn look(nodes: &Nodes) -> Vec<Check> {
    vec![match nodes.gpus {
        0 => Check::ok(NAME, "none; tensors on GPUs are not part of this build"),
        count => Check::warn(
            NAME,
            format!("{count} NVIDIA, but tensors on GPUs are not part of this build"),
            "build with the cargo feature `cuda`",
        ),
    }]
}

#[cfg(feature = "cuda")]
fn look(nodes: &Nodes) -> Vec<Check> {
    use crate::device::cuda::{Device, version};
    match Device::list() {
        Ok(gpus) if !gpus.is_empty() => {
            let (major, minor) = version().unwrap_or_default();
            let count = gpus.len();
            let driver = Check::ok(NAME, format!("{count}, driver for CUDA {major}.{minor}"));
            std::iter::once(driver).chain(gpus.iter().flat_map(present::checks)).collect()
        }
        Ok(_) => vec![absent(nodes, version(), None)],
        Err(error) => vec![absent(nodes, version(), Some(present::said(error)))],
    }
}

/// The device nodes of NVIDIA's driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Nodes {
    /// How many GPUs have one.
    gpus: usize,
    /// The first that this process may not open.
    denied: Option<PathBuf>,
    /// Whether there is that of unified memory, without which CUDA does not start.
    uvm: bool,
}

impl Nodes {
    fn of(dev: &Path) -> Self {
        let mut names: Vec<String> = try_entries(dev)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_gpu(name) || name == "nvidiactl" || name == "nvidia-uvm")
            .collect();
        names.sort();
        Self {
            gpus: names.iter().filter(|name| is_gpu(name)).count(),
            denied: names.iter().map(|name| dev.join(name)).find(|path| is_denied(path)),
            uvm: names.iter().any(|name| name == "nvidia-uvm"),
        }
    }
}

fn is_gpu(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Why there is no GPU to be used, of a driver of this version (`None`: there is none) that refused
/// so, with what is to be done.
#[cfg(feature = "cuda")]
fn absent(nodes: &Nodes, version: Option<(u32, u32)>, refused: Option<(String, String)>) -> Check {
    const CONTAINER: &str = "a container is to be started with its GPUs (`docker run --gpus all`)";
    let Nodes { gpus, denied, uvm } = nodes;
    let Some((major, minor)) = version else {
        return match gpus {
            0 => Check::ok(NAME, "none"),
            count => Check::warn(
                NAME,
                format!("{count} NVIDIA, but no driver library can be loaded (libcuda.so.1)"),
                format!(
                    "install the driver's user-space library; {CONTAINER} and \
                     NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                ),
            ),
        };
    };
    if let Some(path) = denied {
        return Check::warn(
            NAME,
            format!("no permission to open {}", path.display()),
            "join the group that owns it (`ls -l /dev/nvidia*`), or have root make it readable and \
             writable for all",
        );
    }
    if *gpus > 0 && !uvm {
        let found = format!("{gpus} NVIDIA, but no /dev/nvidia-uvm: CUDA does not start");
        let remedy = format!("as root: `nvidia-modprobe -u -c=0`; {CONTAINER}");
        return Check::warn(NAME, found, remedy);
    }
    match refused {
        Some((why, remedy)) if *gpus > 0 || major < 12 => Check::warn(NAME, why, remedy),
        other => {
            let why = other.map_or_else(String::new, |(why, _)| format!("; {why}"));
            let found = format!("none, but a driver library for CUDA {major}.{minor}{why}");
            let remedy = format!("if there should be one: {CONTAINER}; see CUDA_VISIBLE_DEVICES");
            Check::warn(NAME, found, remedy)
        }
    }
}

/// GPUs that are there.
#[cfg(feature = "cuda")]
mod present {
    use crate::device::cuda::{Device, Gpu, LargeCopy, measure};
    use crate::doctor::Check;
    use crate::error::{Error, Result};
    use crate::units::size;
    use std::sync::Arc;

    /// Pinned for a trial: as much as ringstow pins at once.
    const PINNED_BYTES: usize = 64 << 20;
    /// Copied to measure.
    const COPIED_BYTES: usize = 256 << 20;

    pub fn checks(gpu: &Gpu) -> Vec<Check> {
        let name = format!("GPU {}", gpu.ordinal);
        let mut checks = vec![Check::ok(&name, &gpu.name)];
        let tried = Device::get(gpu.ordinal).and_then(|device| {
            checks.push(pinning(&format!("{name} pinning"), &device)?);
            let rates = measure(&device, COPIED_BYTES)?;
            let to = rate(&format!("{name} to host"), rates.to_host_pinned, rates.to_host_pageable);
            let (pinned, pageable) = (rates.to_device_pinned, rates.to_device_pageable);
            checks.extend([to, rate(&format!("{name} from host"), pinned, pageable)]);
            Ok(())
        });
        if let Err(error) = tried {
            let (found, remedy) = said(error);
            checks.push(Check::warn(&format!("{name} copies"), found, remedy));
        }
        checks
    }

    fn pinning(name: &str, device: &Arc<Device>) -> Result<Check> {
        let tried = size(PINNED_BYTES as u64);
        let pinned = LargeCopy::new(device, PINNED_BYTES)?.pin();
        Ok(match pinned {
            Ok(()) => Check::ok(name, format!("works, tried with {tried}")),
            Err(error) => Check::warn(
                name,
                format!("{tried} refused: {}", said(error).0),
                "let the process lock more memory (`ulimit -l unlimited`, in a container `--ulimit \
                 memlock=-1`) and leave some free; without it copies are several times slower",
            ),
        })
    }

    /// Pinned memory is worth its while when the GPU copies it at twice the rate of other memory.
    pub(crate) fn rate(name: &str, pinned: Option<f64>, pageable: f64) -> Check {
        const REMEDY: &str = "pinned should be twice as fast: `nvidia-smi -q` tells the PCIe link's generation and \
             width, `nvidia-smi topo -m` the GPU's NUMA node, where `numactl` has the process run";
        let Some(pinned) = pinned else {
            return Check::ok(name, format!("{pageable:.1} GB/s pageable"));
        };
        let found = format!("{pinned:.1} GB/s pinned, {pageable:.1} pageable");
        match pinned >= 2.0 * pageable {
            true => Check::ok(name, found),
            false => Check::warn(name, found, REMEDY),
        }
    }

    /// What an error says, and its remedy.
    pub fn said(error: Error) -> (String, String) {
        match error {
            Error::Unsupported { what, remedy } => (what, remedy),
            Error::Gpu { doing, device, reason, remedy } => {
                (format!("{doing} GPU {device} failed: {reason}"), remedy)
            }
            other => (other.to_string(), "see `nvidia-smi` and dmesg".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::doctor::gpu::*;

    #[test]
    fn device_nodes_of_gpus_are_counted() {
        let dev = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"] {
            std::fs::write(dev.path().join(name), "").unwrap();
        }
        let nodes = Nodes::of(dev.path());
        assert_eq!(nodes, Nodes { gpus: 2, denied: None, uvm: true });
        assert_eq!(Nodes::of(&dev.path().join("missing")), Nodes::default());
    }

    #[cfg(feature = "cuda")]
    mod with_cuda {
        use super::super::super::Status;
        use super::*;

        fn nodes(gpus: usize) -> Nodes {
            Nodes { gpus, denied: None, uvm: gpus > 0 }
        }

        #[test]
        fn neither_gpu_nor_driver_is_no_shortfall() {
            assert_eq!(absent(&nodes(0), None, None), Check::ok("GPU", "none"));
        }

        #[test]
        fn what_keeps_cuda_from_starting_is_named_with_its_remedy() {
            let denied = Nodes { denied: Some("/dev/nvidiactl".into()), ..nodes(1) };
            let no_uvm = Nodes { uvm: false, ..nodes(1) };
            let no_device = Some(("does not start: no device".to_owned(), "see".to_owned()));
            let old = Some(("is one for CUDA 11.8".to_owned(), "update it".to_owned()));
            let (new_driver, old_driver) = (Some((12, 8)), Some((11, 8)));
            for (check, found, remedy) in [
                (absent(&nodes(2), None, None), "2 NVIDIA", "--gpus all"),
                (absent(&nodes(0), new_driver, no_device), "no device", "--gpus all"),
                (absent(&nodes(0), old_driver, old), "11.8", "update"),
                (absent(&denied, new_driver, None), "/dev/nvidiactl", "group"),
                (absent(&no_uvm, new_driver, None), "nvidia-uvm", "modprobe"),
                (present::rate("rate", Some(30.0), 20.0), "30.0 GB/s", "numactl"),
            ] {
                assert_eq!(check.status, Status::Warn);
                assert!(check.found.contains(found), "{check:?}");
                assert!(check.remedy.as_ref().unwrap().contains(remedy), "{check:?}");
            }
        }

        #[test]
        fn pinned_copies_of_twice_the_rate_are_as_they_should_be() {
            assert_eq!(present::rate("rate", Some(50.0), 20.0).status, Status::Ok);
            assert_eq!(present::rate("rate", None, 20.0).status, Status::Ok);
        }
    }
}
