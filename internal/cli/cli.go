// Package cli is the frame that both programs hang their commands in: streams
// and environment that a test can replace, one exit code for each kind of end,
// help that is written once.
//
// A command is a struct made by a constructor; it never touches os.Args,
// os.Stdout or a global flag set, so tests run whole commands in-process and
// compare what they print.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// Exit codes.
const (
	ExitOK     = 0 // done
	ExitFailed = 1 // the work failed
	ExitUsage  = 2 // wrong command line or configuration; nothing was done
)

// SecondSignal is how long after the first order to stop another one is taken for the same.
const SecondSignal = 300 * time.Millisecond

// Env is the world that a command sees.
type Env struct {
	Stdout  io.Writer // results
	Stderr  io.Writer // messages and the log
	Environ []string  // as os.Environ
	// Signals delivers what the process was sent. nil: none.
	Signals <-chan os.Signal
	// OwnProcess: the program is all there is in the process and may change its properties. Tests
	// that run programs in theirs leave it false.
	OwnProcess bool
}

// Getenv looks a variable up in Environ.
func (e *Env) Getenv(key string) string {
	for i := len(e.Environ) - 1; i >= 0; i-- {
		if k, v, ok := strings.Cut(e.Environ[i], "="); ok && k == key {
			return v
		}
	}
	return ""
}

// Printf writes to Stdout.
func (e *Env) Printf(format string, a ...any) { fmt.Fprintf(e.Stdout, format, a...) }

// A Command is one verb of a program.
type Command struct {
	Name  string
	Args  string // the arguments in the usage line: "ADDR[:PORT] [flags]"
	Short string // one line for the list of commands
	Long  string // paragraphs for its own help
	Flags *pflag.FlagSet
	// OwnSignals: the command reads Env.Signals itself. Otherwise SIGINT and SIGTERM end its context.
	OwnSignals bool
	// Run does the work. args are what the flags left over.
	Run func(ctx context.Context, args []string) error
}

// WithOwnSignals sets OwnSignals.
func (c *Command) WithOwnSignals() *Command {
	c.OwnSignals = true
	return c
}

// NewFlagSet makes a flag set that neither prints nor exits by itself and keeps flags in
// the order in which they were defined.
func NewFlagSet(name string) *pflag.FlagSet {
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.SortFlags = false
	fs.Usage = func() {}
	return fs
}

// A Program is a set of commands.
type Program struct {
	Name     string
	Short    string // one sentence: what the program is
	Epilog   string // after the list of commands
	Commands []*Command
	// Usual is the command that was meant when a file or an address stands in the place of one.
	Usual string
}

// usageError marks an error as the user's to correct.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

// Usage marks err as an error of usage or configuration: exit code 2.
func Usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// Usagef is Usage(fmt.Errorf(…)).
func Usagef(format string, a ...any) error { return usageError{fmt.Errorf(format, a...)} }

// IsUsage tells whether err was marked by Usage.
func IsUsage(err error) bool {
	var u usageError
	return errors.As(err, &u)
}

// Main runs the command that args (without the program's name) ask for, prints
// the error if there is one, and returns the exit code.
func (p *Program) Main(ctx context.Context, env *Env, args []string) int {
	if len(args) == 0 {
		p.help(env.Stderr)
		return ExitUsage
	}
	switch args[0] {
	case "help", "-h", "--help":
		if len(args) > 1 && args[0] == "help" {
			if c := p.find(args[1]); c != nil {
				p.commandHelp(env.Stdout, c)
				return ExitOK
			}
			return p.fail(env, "", Usagef("there is no command %q%s", args[1], p.didYouMean(args[1])))
		}
		p.help(env.Stdout)
		return ExitOK
	case "--version":
		args = []string{"version"}
	}
	c := p.find(args[0])
	if c == nil {
		if strings.HasPrefix(args[0], "-") {
			return p.fail(env, "", Usagef("unknown flag %q before the command", args[0]))
		}
		return p.fail(env, "", Usagef("there is no command %q%s", args[0], p.hint(args[0])))
	}
	if err := c.Flags.Parse(args[1:]); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			p.commandHelp(env.Stdout, c)
			return ExitOK
		}
		return p.fail(env, c.Name, Usage(flagError(c.Flags, err)))
	}
	if !c.OwnSignals {
		var stop func()
		ctx, stop = untilSignal(ctx, env)
		defer stop()
	}
	if err := c.Run(ctx, c.Flags.Args()); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errStopped) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return p.fail(env, c.Name, traceHint(args[1:], err))
	}
	return ExitOK
}

var errStopped = errors.New("stopped")

// untilSignal ends a context when the process is told to stop.
func untilSignal(ctx context.Context, env *Env) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case sig := <-env.Signals:
				if sig == unix.SIGINT || sig == unix.SIGTERM {
					cancel(fmt.Errorf("%w by a signal (%v)", errStopped, sig))
				}
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// hint is what a word that is no command may have been meant for.
func (p *Program) hint(word string) string {
	if h := p.didYouMean(word); h != "" || p.Usual == "" || !strings.ContainsAny(word, "./:") {
		return h
	}
	return fmt.Sprintf(" (did you mean '%s %s %s'?)", p.Name, p.Usual, word)
}

func (p *Program) didYouMean(word string) string {
	names := []string{"help"}
	for _, c := range p.Commands {
		names = append(names, c.Name)
	}
	return DidYouMean("", word, names)
}

func (p *Program) find(name string) *Command {
	for _, c := range p.Commands {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// fail prints every line of err (joined errors have several) with the program's and the command's name.
func (p *Program) fail(env *Env, command string, err error) int {
	prefix := p.Name + ": "
	if command != "" {
		prefix += command + ": "
	}
	for line := range strings.SplitSeq(strings.TrimRight(err.Error(), "\n"), "\n") {
		fmt.Fprintf(env.Stderr, "%s%s\n", prefix, line)
	}
	if !IsUsage(err) {
		return ExitFailed
	}
	if c := p.find(command); c != nil {
		fmt.Fprintf(env.Stderr, "See '%s %s --help'.\n", p.Name, c.Name)
	} else {
		fmt.Fprintf(env.Stderr, "See '%s help'.\n", p.Name)
	}
	return ExitUsage
}

func (p *Program) help(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n\nUsage: %s COMMAND [arguments]\n\nCommands:\n", p.Name, p.Short, p.Name)
	for _, c := range p.Commands {
		fmt.Fprintf(w, "  %-14s%s\n", c.Name, c.Short)
	}
	fmt.Fprintf(w, "  %-14s%s\n", "help", "explain a command: "+p.Name+" help COMMAND")
	if p.Epilog != "" {
		fmt.Fprintf(w, "\n%s", p.Epilog)
	}
}

func (p *Program) commandHelp(w io.Writer, c *Command) {
	fmt.Fprintf(w, "Usage: %s\n\n%s\n", strings.TrimRight(p.Name+" "+c.Name+" "+c.Args, " "), strings.TrimRight(c.Long, "\n"))
	if c.Flags.HasAvailableFlags() {
		fmt.Fprintf(w, "\nFlags:\n%s", c.Flags.FlagUsagesWrapped(100))
	}
}
