//! The library's [`Config`], as flags.

use super::place::place;
use crate::config::{Config, EngineChoice, IoPriority, Switch, parse_pool_size, parse_size};
use crate::error::Result;
use clap::Args;
use std::path::PathBuf;

/// How to move bytes. Unset options come from RINGSTOW_*, then ringstow.toml.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "How to move bytes")]
pub struct ConfigFlags {
    /// Staging memory: auto, or a size (4M and 4MiB are 2^22 bytes, 4MB is 4·10^6) [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = parse_pool_size)]
    pool_bytes: Option<u64>,

    /// Size of a staging buffer and of a transfer; a multiple of 4096 [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    block_bytes: Option<u64>,

    /// Transfers in flight at once [default: 8]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,

    /// Threads that copy and checksum; 0: one per core, at most eight [default: 0]
    #[arg(long, value_name = "N")]
    fillers: Option<u32>,

    /// How far ringstow's threads come after others where cores are short, 0 to 19 [default: 0]
    #[arg(long, value_name = "N")]
    nice: Option<u32>,

    /// How far disk I/O comes after that of others: normal, low or idle [default: normal]
    #[arg(long, value_name = "PRIORITY", hide_possible_values = true)]
    io_priority: Option<IoPriority>,

    /// Most bytes per second that a save writes; 0: no limit [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    write_rate: Option<u64>,

    /// Engine that moves the bytes: auto, uring, portable or, in builds that have it, tokio-uring [default: auto]
    #[arg(long, value_name = "ENGINE", hide_possible_values = true)]
    engine: Option<EngineChoice>,

    /// Bypass the page cache with O_DIRECT: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true)]
    direct: Option<Switch>,

    /// Register the staging memory with io_uring: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true)]
    fixed: Option<Switch>,

    /// Files that a save writes at the same time in each directory, 1 to 64 [default: 1]
    #[arg(long, value_name = "N")]
    files: Option<u32>,

    #[command(flatten)]
    stripe: StripeFlags,
}

/// Directories that checkpoints are striped over.
#[derive(Debug, Clone, Args)]
pub struct StripeFlags {
    /// A directory on another disk that checkpoints are striped over; repeat for each
    #[arg(long, value_name = "DIR", value_parser = place())]
    stripe: Vec<PathBuf>,
}

impl StripeFlags {
    /// Returns the configuration, with these directories if there are any.
    ///
    /// # Errors
    /// As [`Config::found`] and [`Config::validate`].
    pub fn config(&self) -> Result<Config> {
        self.over(Config::found()?)
    }

    fn over(&self, mut config: Config) -> Result<Config> {
        if !self.stripe.is_empty() {
            config.stripe.clone_from(&self.stripe);
        }
        // What the program writes is no step of a training.
        config.tiers.clear();
        config.validate()?;
        Ok(config)
    }
}

impl ConfigFlags {
    /// Returns the configuration, validated.
    ///
    /// # Errors
    /// As [`Config::found`] and [`Config::validate`].
    pub fn config(&self) -> Result<Config> {
        self.over(Config::found()?)
    }

    /// Returns this configuration with what the flags set, validated.
    ///
    /// # Errors
    /// As [`Config::validate`].
    pub fn over(&self, found: Config) -> Result<Config> {
        let found = self.stripe.over(found)?;
        let config = Config {
            pool_bytes: self.pool_bytes.unwrap_or(found.pool_bytes),
            block_bytes: self.block_bytes.unwrap_or(found.block_bytes),
            queue_depth: self.queue_depth.unwrap_or(found.queue_depth),
            fillers: self.fillers.unwrap_or(found.fillers),
            nice: self.nice.unwrap_or(found.nice),
            io_priority: self.io_priority.unwrap_or(found.io_priority),
            write_rate: self.write_rate.unwrap_or(found.write_rate),
            engine: self.engine.unwrap_or(found.engine),
            direct: self.direct.unwrap_or(found.direct),
            fixed: self.fixed.unwrap_or(found.fixed),
            files: self.files.unwrap_or(found.files),
            ..found
        };
        config.validate()?;
        Ok(config)
    }
}
