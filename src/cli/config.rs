//! The library's [`Config`], as flags.

use super::place::place;
use crate::config::{Config, EngineChoice, Switch, parse_size};
use crate::error::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

/// How bytes are moved. What is not said here, RINGSTOW_* in the environment and ringstow.toml say.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "How bytes are moved")]
pub struct ConfigFlags {
    /// Staging memory (4M and 4MiB are 2^22 bytes, 4MB is 4·10^6) [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_bytes: Option<u64>,

    /// One staging buffer, which is also one transfer; a multiple of 4096 [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    block_bytes: Option<u64>,

    /// Transfers in flight at once [default: 8]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,

    /// Threads that copy and checksum; 0: one a core, at most four [default: 0]
    #[arg(long, value_name = "N")]
    fillers: Option<u32>,

    /// Who moves the bytes: auto, uring, portable or, in builds that have it, tokio-uring [default: auto]
    #[arg(long, value_name = "ENGINE", hide_possible_values = true, value_parser = engine())]
    engine: Option<EngineChoice>,

    /// O_DIRECT, past the page cache: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true, value_parser = switch())]
    direct: Option<Switch>,

    /// Staging memory registered with io_uring: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", hide_possible_values = true, value_parser = switch())]
    fixed: Option<Switch>,

    /// Files that a save writes at the same time in each directory, 1 to 64 [default: 1]
    #[arg(long, value_name = "N")]
    files: Option<u32>,

    #[command(flatten)]
    stripe: StripeFlags,
}

/// Where checkpoints are striped over, for commands that move no bytes.
#[derive(Debug, Clone, Args)]
pub struct StripeFlags {
    /// A directory on another disk that checkpoints are striped over; once for each
    #[arg(long, value_name = "DIR", value_parser = place())]
    stripe: Vec<PathBuf>,
}

impl StripeFlags {
    /// The configuration, with these directories where there are some.
    ///
    /// # Errors
    /// What [`Config::found`] and [`Config::validate`] give.
    pub fn config(&self) -> Result<Config> {
        let mut config = Config::found()?;
        if !self.stripe.is_empty() {
            config.stripe.clone_from(&self.stripe);
        }
        config.validate()?;
        Ok(config)
    }
}

impl ConfigFlags {
    /// The configuration, checked.
    ///
    /// # Errors
    /// What [`Config::found`] and [`Config::validate`] give.
    pub fn config(&self) -> Result<Config> {
        let found = self.stripe.config()?;
        let config = Config {
            pool_bytes: self.pool_bytes.unwrap_or(found.pool_bytes),
            block_bytes: self.block_bytes.unwrap_or(found.block_bytes),
            queue_depth: self.queue_depth.unwrap_or(found.queue_depth),
            fillers: self.fillers.unwrap_or(found.fillers),
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

fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    PossibleValuesParser::new(["auto", "uring", "portable", "tokio-uring"]).map(|name| {
        match name.as_str() {
            "uring" => EngineChoice::Uring,
            "portable" => EngineChoice::Portable,
            "tokio-uring" => EngineChoice::TokioUring,
            _ => EngineChoice::Auto,
        }
    })
}

fn switch() -> impl TypedValueParser<Value = Switch> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|name| match name.as_str() {
        "on" => Switch::On,
        "off" => Switch::Off,
        _ => Switch::Auto,
    })
}
