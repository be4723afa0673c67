package cli

import "encoding/json"

// PrintJSON writes v to standard output, indented, with <, > and & as they are.
func (e *Env) PrintJSON(v any) error {
	enc := json.NewEncoder(e.Stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
