//! Texts of errors.

/// Returns the texts of an error and of its causes in one line, without those of causes that the error's own text ends with.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let cause_text = error.to_string();
        if !text.ends_with(&cause_text) {
            text += &format!(": {cause_text}");
        }
        cause = error.source();
    }
    text
}
