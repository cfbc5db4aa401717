//! Probes services in this process that answer, fall silent, close connections or give wrong answers.

#[cfg(test)]
mod echo;
#[cfg(test)]
mod http;
#[cfg(test)]
mod netns;
#[cfg(test)]
mod run;
#[cfg(test)]
mod server;
#[cfg(test)]
mod tcp;
