//! Commands to the TPM of the micro guest, as bytes (TPM 2.0 Library, part 3). The guest needs ACPI: UEFI must start it.

/// The header of a session without a password, for a command of one handle.
const NO_PASSWORD: &str = "00000009400000090000000000";
/// The owner of the TPM.
const OWNER: &str = "40000001";
/// The index of a variable.
const VARIABLE: &str = "01500001";

/// The TPM of a guest, which answers the agent's commands.
pub struct Tpm<'a>(pub &'a dyn Fn(&str) -> String);

impl Tpm<'_> {
    /// Sends a command: its code, and what follows. Returns the reply without its header.
    #[track_caller]
    fn command(&self, has_session: bool, code: &str, rest: &str) -> String {
        let tag = if has_session { "8002" } else { "8001" };
        let length = 10 + rest.len() / 2;
        let reply = (self.0)(&format!("tpm {tag}{length:08x}{code}{rest}"));
        assert_eq!(reply.get(12..20), Some("00000000"), "the TPM rejects command {code}: {reply}");
        reply[20..].to_owned()
    }

    /// Adds a measurement to a register that an application may use. Only a start of the guest clears it.
    pub fn measure(&self, byte: u8) {
        let digest = format!("{byte:02x}").repeat(32);
        self.command(true, "00000182", &format!("00000010{NO_PASSWORD}00000001000b{digest}"));
    }

    /// Returns that register.
    pub fn register(&self) -> String {
        let reply = self.command(false, "0000017e", "00000001000b03000001");
        reply[reply.len() - 64..].to_owned()
    }

    /// Makes a variable that is kept without power.
    pub fn define_variable(&self) {
        let public = format!("{VARIABLE}000b0206000600000008");
        self.command(true, "0000012a", &format!("{OWNER}{NO_PASSWORD}0000000e{public}"));
    }

    /// Gives it a state: the variable is 1, and the register, which is returned, has one measurement.
    #[must_use]
    pub fn fill(&self) -> String {
        self.define_variable();
        self.write_variable(1);
        self.measure(1);
        self.register()
    }

    /// Sets the variable.
    pub fn write_variable(&self, value: u64) {
        self.command(true, "00000137", &format!("{OWNER}{VARIABLE}{NO_PASSWORD}0008{value:016x}0000"));
    }

    /// Returns the variable.
    pub fn variable(&self) -> u64 {
        let reply = self.command(true, "0000014e", &format!("{OWNER}{VARIABLE}{NO_PASSWORD}00080000"));
        // After the lengths of the reply and of the value; the session follows.
        u64::from_str_radix(&reply[12..28], 16).unwrap()
    }
}
