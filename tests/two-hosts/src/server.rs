//! The server's process: answers both mounts, and the orders of the test.

use crate::Rules;
use crate::client::Client;
use crate::fuse::Mounted;
use crate::tree::Tree;
use crate::turns::Turns;
use fuser::{BackgroundSession, Config, MountOption};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Where to mount, and how; set only for the server.
pub const ASKED: &str = "TWO_HOSTS_SERVER";
/// Begins each reply.
pub const REPLY: &str = "two-hosts: ";

/// What a test wants of the server.
#[derive(Serialize, Deserialize)]
pub enum Order {
    Rules(usize, Rules),
    Refresh(usize),
    Work(usize, bool),
    End,
}

/// All that there is.
pub struct World {
    tree: Tree,
    pub clients: [Client; 2],
    turns: Turns,
}

/// The world, and the wait for a turn.
pub struct Answering {
    world: Mutex<World>,
    turn: Condvar,
}

impl Answering {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something that is no host's request.
    pub fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.lock());
        self.turn.notify_all();
    }

    /// Waits until a host's request is next, and answers it.
    pub fn answer<T>(&self, host: usize, answer: impl FnOnce(&mut Client, &mut Tree) -> T) -> T {
        let waiting = self.turn.wait_while(self.lock(), |world| !world.turns.is_next(host));
        let mut world = waiting.unwrap_or_else(PoisonError::into_inner);
        let World { tree, clients, turns } = &mut *world;
        clients[host].count();
        let answered = answer(&mut clients[host], tree);
        turns.count(host);
        self.turn.notify_all();
        answered
    }

    fn carry_out(&self, order: Order) {
        self.change(|World { clients, turns, .. }| match order {
            Order::Rules(host, rules) => clients[host].set_rules(rules),
            Order::Refresh(host) => clients[host].refresh(),
            Order::Work(host, working) => turns.set_working(host, working),
            Order::End => {}
        });
    }
}

/// Is the server of a [`Share`](crate::Share), in the process that [`Share::mount`](crate::Share::mount) has started, until
/// the share is dropped or its process ends. Does nothing in any other process.
pub fn serve() {
    let Ok(asked) = std::env::var(ASKED) else { return };
    let (points, rules, seed) = serde_json::from_str(&asked).expect("what Share::mount asks");
    match mount(&points, rules, seed) {
        Ok((answering, mounted)) => {
            reply("");
            for order in io::stdin().lines().map_while(Result::ok) {
                let order = serde_json::from_str(&order).expect("an order");
                if let Order::End = order {
                    break;
                }
                answering.carry_out(order);
                reply("");
            }
            for session in mounted {
                if let Err(error) = session.umount_and_join() {
                    eprintln!("{REPLY}{error}");
                }
            }
            reply("");
        }
        Err(error) => reply(&error.to_string()),
    }
    // Whatever is still mounted fails from now on, and keeps nobody waiting.
    std::process::exit(0);
}

fn reply(text: &str) {
    println!("\n{REPLY}{text}");
}

type Mounts = (Arc<Answering>, Vec<BackgroundSession>);

fn mount(points: &[PathBuf; 2], rules: Rules, seed: u64) -> io::Result<Mounts> {
    let client = |host: usize| Client::new(host, rules, seed.wrapping_mul(2) + host as u64);
    let clients = [client(0), client(1)];
    let world = World { tree: Tree::new(), clients, turns: Turns::new(seed) };
    let answering = Arc::new(Answering { world: Mutex::new(world), turn: Condvar::new() });
    let mount = |(host, point): (usize, &PathBuf)| mount_one(&answering, host, point, rules);
    let mounted = points.iter().enumerate().map(mount).collect::<io::Result<_>>()?;
    Ok((answering, mounted))
}

fn mount_one(
    answering: &Arc<Answering>,
    host: usize,
    point: &Path,
    rules: Rules,
) -> io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("two-hosts".into())];
    let (server, shared_locks) = (Arc::clone(answering), rules.shared_locks);
    fuser::spawn_mount(Mounted { server, host, shared_locks }, point, &config)
}
