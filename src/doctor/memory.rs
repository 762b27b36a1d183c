//! Checks memory: limits, huge pages, and a virtual machine's balloon.

use crate::config::{Config, Switch};
use crate::doctor::Check;
use crate::pool::{self, Mapping};
use crate::sys::dir::try_entries;
use crate::sys::file::read_kernel_text;
use crate::sys::{memlock, memory};
use crate::units::size;
use std::path::Path;

/// Where the kernel lists the balloons of a virtual machine.
const BALLOONS: &str = "/sys/bus/virtio/drivers/virtio_balloon";

/// The bit of a balloon's features that stands for free page reporting (virtio 1.2, 5.5.3).
const REPORTING: usize = 5;

pub(crate) fn checks(config: &Config) -> Vec<Check> {
    let limit = memory::group_limit_bytes();
    let mut checks: Vec<Check> = limit.map(|limit| group(config, limit)).into_iter().collect();
    checks.extend([
        staging(config),
        memory_lock(config),
        huge_pages(),
        free_memory(Path::new(BALLOONS)),
    ]);
    checks
}

/// The memory limit of a container or a systemd unit. If the pool is larger, a save cannot return an error: a large
/// save comes to use the whole pool, and the kernel kills the process.
fn group(config: &Config, limit: u64) -> Check {
    let name = "memory limit";
    let found = format!("{}, the pool has {}", size(limit), size(config.staging_bytes()));
    if limit > config.staging_bytes() {
        return Check::ok(name, found);
    }
    let found = format!("{found}: a save as large as that would be killed");
    let remedy = "lower pool_bytes, or give the container (`--memory` of docker) or the unit \
                  (`MemoryMax=` of systemd) more";
    Check::fail(name, found, remedy)
}

/// Says how much memory background saves may take, so that training does not wait for the disk.
fn staging(config: &Config) -> Check {
    const NAME: &str = "background saves";
    const UNTIL: &str = "until then, training waits for the disk to take what is beyond that";
    if !config.is_pool_automatic() {
        let bytes = size(config.staging_bytes());
        return Check::ok(NAME, format!("may take {bytes} in each process, as pool_bytes says"));
    }
    match pool::left() {
        Ok((0, of)) => Check::warn(
            NAME,
            format!("may take the least that they need: {of} has no memory left for more"),
            format!("give the job more memory; {UNTIL}"),
        ),
        Ok((left, of)) => {
            let left = size(left);
            Check::ok(NAME, format!("may take {left} together, half of what {of} has available"))
        }
        Err(why) => Check::warn(
            NAME,
            format!("may take {}: {}", size(config.staging_bytes()), why.reason()),
            format!("mount /proc, or set pool_bytes; {UNTIL}"),
        ),
    }
}

fn memory_lock(config: &Config) -> Check {
    let name = "memory lock limit";
    let pool = config.staging_bytes();
    match memlock::limit_bytes() {
        None => Check::ok(name, "unlimited"),
        Some(limit) if limit >= pool + memlock::RING_BYTES => {
            Check::ok(name, format!("{}, the pool has {}", size(limit), size(pool)))
        }
        Some(limit) => {
            let (limit, pool) = (size(limit), size(pool));
            let found = format!("{limit} of the pool's {pool} at most can be fixed buffers");
            let remedy = memlock::remedy(config.staging_bytes());
            Check::short(config.fixed == Switch::On, name, found, remedy)
        }
    }
}

/// Checks whether staging memory gets huge pages, with a mapping made like the pool's.
fn huge_pages() -> Check {
    const TRIED: usize = 8 << 20;
    let name = "transparent huge pages";
    let remedy = "as root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, and leave \
                  some memory free";
    let setting = read_kernel_text("/sys/kernel/mm/transparent_hugepage/enabled");
    let setting = setting.map_or("no setting".into(), |text| format!("set to {}", text.trim()));
    let got = Mapping::new(TRIED).ok().and_then(|mut mapping| {
        mapping.prefault_all();
        huge_bytes_at(mapping.as_ptr() as u64)
    });
    match got {
        Some(bytes) if bytes >= TRIED as u64 => {
            Check::ok(name, format!("{setting}; staging memory gets them"))
        }
        Some(bytes) => {
            let (bytes, tried) = (size(bytes), size(TRIED as u64));
            Check::warn(name, format!("{setting}; {bytes} of {tried} tried got them"), remedy)
        }
        None => {
            Check::warn(name, format!("{setting}; the kernel does not say who gets them"), remedy)
        }
    }
}

/// `AnonHugePages` of the mapping that holds an address, in bytes.
fn huge_bytes_at(address: u64) -> Option<u64> {
    let smaps = read_kernel_text("/proc/self/smaps").ok()?;
    let mut inside = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next()?;
        if let Some((start, end)) = first.split_once('-') {
            let hex = |text| u64::from_str_radix(text, 16).ok();
            inside = (hex(start)?..hex(end)?).contains(&address);
        } else if inside && first == "AnonHugePages:" {
            return words.next()?.parse::<u64>().ok()?.checked_mul(1024);
        }
    }
    None
}

/// Checks whether a virtual machine's host takes free memory back.
fn free_memory(balloons: &Path) -> Check {
    let name = "free memory";
    if !reports_free_pages(balloons) {
        return Check::ok(name, "stays with this machine, as far as it can tell");
    }
    Check::warn(
        name,
        "this virtual machine's host takes it back (virtio balloon, free page reporting)",
        "the first access to it is slow, often slower than the disk, and so are loads into fresh memory; \
         load_into, into existing tensors, does not wait for any",
    )
}

fn reports_free_pages(balloons: &Path) -> bool {
    let devices = try_entries(balloons).unwrap_or_default();
    // One character per bit, from bit 0 on.
    let features =
        devices.iter().filter_map(|device| read_kernel_text(device.path().join("features")).ok());
    features.into_iter().any(|bits| bits.as_bytes().get(REPORTING) == Some(&b'1'))
}

#[cfg(test)]
mod tests {
    use crate::doctor::Status;
    use crate::doctor::memory::*;
    use std::fs;

    #[test]
    fn a_pool_that_no_group_has_room_for_is_a_failure_with_its_remedy() {
        let config = Config::default();
        assert_eq!(group(&config, config.staging_bytes() + 1).status, Status::Ok);
        let check = group(&config, config.staging_bytes());
        assert_eq!(check.status, Status::Fail);
        assert!(check.remedy.is_some_and(|remedy| remedy.contains("pool_bytes")));
    }

    #[test]
    fn a_balloon_that_reports_free_pages_is_told_from_others() {
        let balloons = tempfile::tempdir().unwrap();
        let device = balloons.path().join("virtio3");
        assert_eq!(free_memory(balloons.path()).status, Status::Ok);
        fs::create_dir(&device).unwrap();
        fs::write(balloons.path().join("uevent"), "").unwrap();
        for (features, status) in
            [("0110000000", Status::Ok), ("", Status::Ok), ("0110010100\n", Status::Warn)]
        {
            fs::write(device.join("features"), features).unwrap();
            assert_eq!(free_memory(balloons.path()).status, status, "{features}");
        }
        assert_eq!(free_memory(&balloons.path().join("none")).status, Status::Ok);
    }
}
