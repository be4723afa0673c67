package cli

import "github.com/spf13/pflag"

// OutputFlag adds -o to the flags of a command that prints for people or for programs.
func OutputFlag(fs *pflag.FlagSet) *string {
	return fs.StringP("output", "o", "text", "`format` of the output: text or json (stable)")
}

// CheckOutput returns a usage error unless o, the value of OutputFlag, is text or json.
func CheckOutput(o string) error {
	if o != "text" && o != "json" {
		return Usagef("--output: %q is neither text nor json", o)
	}
	return nil
}
