//! Processes of one control group that save at once.

use ringstow::{Config, Dtype, Source, StateDict, Store, TensorInfo};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The memory of the group. Three processes, each with a state of `STATE` bytes, could not all have it.
const LIMIT: u64 = 768 << 20;
const STATE: u64 = 320 << 20;
const PROCESSES: usize = 3;
/// What each save takes.
const LEAST: u64 = 64 << 20;

/// The group that a child of the test joins, and where it saves.
const GROUP: &str = "RINGSTOW_TEST_GROUP";
const TO: &str = "RINGSTOW_TEST_TO";

/// Bytes that need no memory.
struct Zeros;

impl Source for Zeros {
    fn nbytes(&self) -> u64 {
        STATE
    }
    fn read(&self, _: usize, into: &mut [u8]) -> ringstow::Result<()> {
        into.fill(0);
        Ok(())
    }
}

/// A control group with limited memory, until it is dropped.
struct Group(PathBuf);

impl Group {
    /// Of either version. The error says what the machine lacks.
    fn new() -> Result<Self, String> {
        let name = format!("ringstow-test-{}", std::process::id());
        let versions =
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        let mut why = String::new();
        for (above, limit) in versions {
            let group = Self(Path::new(above).join(&name));
            let made = fs::create_dir(&group.0);
            match made.and_then(|()| fs::write(group.0.join(limit), LIMIT.to_string())) {
                Ok(()) => return Ok(group),
                Err(error) => why = format!("{}: {error}", group.0.display()),
            }
        }
        Err(format!("control group with limited memory: {why}"))
    }

    fn start(&self, to: &Path) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "groups::child_saves_in_its_group", "--nocapture"])
            .envs([(GROUP, self.0.as_path()), (TO, to)])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _left = fs::remove_dir(&self.0);
    }
}

#[test]
fn child_saves_in_its_group() {
    let (Some(group), Some(to)) = (std::env::var_os(GROUP), std::env::var_os(TO)) else { return };
    fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let mut state = StateDict::new();
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![STATE] };
    state.source(info, Box::new(Zeros));
    let store = Store::new(Config { write_rate: 100 << 20, ..Config::default() }).unwrap();
    let report = store.save_async(state, to).unwrap().result().unwrap();
    println!("had {}", report.pool_bytes);
    let reasons = report.moved.fallbacks.iter().map(|step| step.reason.as_str());
    println!("{}", reasons.collect::<String>());
}

#[test]
fn processes_of_a_group_take_half_of_its_memory_together() {
    let group = match Group::new() {
        Ok(group) => group,
        // Many machines where all other rigs run let nobody make one.
        Err(why) => return println!("skipped: no {why}"),
    };
    // On a disk: files in memory would be the group's, too.
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |number: usize| root.path().join(number.to_string());
    let children: Vec<Child> = (0..PROCESSES).map(|number| group.start(&path(number))).collect();
    let mut had = Vec::new();
    let mut said = String::new();
    for child in children {
        let ended = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success(), "{:?}: {text}", ended.status);
        let bytes = text.lines().find_map(|line| line.strip_prefix("had ")).unwrap();
        had.push(bytes.parse::<u64>().unwrap());
        said += &text;
    }
    // What no save can do without, one takes that begins when the others have all there is.
    let more: Vec<u64> = had.iter().copied().filter(|&bytes| bytes > LEAST).collect();
    assert!(more.iter().sum::<u64>() <= LIMIT / 2, "{had:?}");
    assert!(!more.is_empty(), "{had:?}");
    let name = group.0.file_name().unwrap().to_str().unwrap();
    assert!(said.contains(&format!("of the control group /{name} (limit 805 MB,")), "{said}");
    for number in 0..PROCESSES {
        assert!(ringstow::verify(path(number)).unwrap().damage.is_empty());
    }
}
