//! Two hosts on one network file system, for tests in other languages.
//!
//! `two-hosts DIR SEED` mounts the share at `DIR/a` and `DIR/b`, and prints `done`. Each line that it then reads is an
//! order, which it answers with `done`: `rules HOST JSON` (of [`Rules`]), `refresh`, `work HOST` and `rest HOST` (the
//! beginning and the end of [`Host::work`](two_hosts::Host::work)). It unmounts at the end of its input. An error is a line
//! that starts with `error:`. Start it in a mount namespace of its own (`unshare --mount`), which programs of the hosts
//! enter, so that nothing outlives a killed test.

#[cfg(target_os = "linux")]
fn main() {
    two_hosts::serve();
    if let Err(why) = linux::obey() {
        println!("error: {why}");
        std::process::exit(1);
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::PathBuf;
    use std::process::Command;
    use two_hosts::{Rules, Share, Working};

    pub fn obey() -> Result<(), String> {
        let mut arguments = std::env::args().skip(1);
        let below = PathBuf::from(arguments.next().ok_or("which directory?")?);
        let seed = arguments.next().and_then(|seed| seed.parse().ok()).ok_or("which seed?")?;
        let server = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
        let share = Share::mount(server, &below, Rules::default(), seed);
        let share = share.map_err(|e| format!("cannot mount over FUSE: {e}"))?;
        println!("done");
        let mut working = [None, None];
        for line in std::io::stdin().lines() {
            carry_out(&line.map_err(|e| e.to_string())?, &share, &mut working)?;
            println!("done");
        }
        Ok(())
    }

    fn carry_out<'a>(
        order: &str,
        share: &'a Share,
        working: &mut [Option<Working<'a>>; 2],
    ) -> Result<(), String> {
        let mut words = order.splitn(3, ' ');
        let word = words.next();
        let host =
            words.next().and_then(|host| host.parse::<usize>().ok()).filter(|&host| host < 2);
        match (word, host) {
            (Some("refresh"), None) => share.refresh(),
            (Some("work"), Some(host)) => working[host] = Some(share.host(host).work()),
            (Some("rest"), Some(host)) => working[host] = None,
            (Some("rules"), Some(host)) => {
                let rules = serde_json::from_str(words.next().unwrap_or_default());
                share.host(host).set_rules(rules.map_err(|e| e.to_string())?);
            }
            _ => return Err(format!("an order, not {order:?}")),
        }
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("error: this needs Linux");
}
