// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The exit statuses.
const (
	statusOK          = 0
	statusFailed      = 1
	statusUsage       = 2
	statusInterrupted = 130 // 128 + SIGINT, as shells count
)

// usageError is an error in the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// given reports whether the command line says something by a flag. That it is off says nothing
// where it is off by itself.
func given(c *cobra.Command, name string) bool {
	f := c.Flags().Lookup(name)
	off := f.DefValue == "false" || f.DefValue == "0"
	return f.Changed && !(off && f.Value.String() == f.DefValue)
}

// refuse returns a usage error about the first of these flags that the user gave: a command that
// ignored it in silence would be believed. The text has a place for its name.
func refuse(c *cobra.Command, text string, names ...string) error {
	for _, name := range names {
		if given(c, name) {
			return usagef(text, name)
		}
	}
	return nil
}

// checkEmpty refuses an empty value, as of a variable of a script that is not set: it would say
// nothing.
func checkEmpty(c *cobra.Command, _ []string) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		empty := f.Value.Type() == "string" && f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			all := list.GetSlice()
			empty = len(all) == 0 || slices.Contains(all, "")
		}
		if empty {
			err = usagef("--%s is empty: give it a value, or leave it out", f.Name)
		}
	})
	return err
}

// flagError turns an error of a flag into a usageError that names the values it may have.
func flagError(err error) error {
	var wrong *pflag.InvalidValueError
	if !errors.As(err, &wrong) {
		return &usageError{err}
	}
	f, cause := wrong.GetFlag(), wrong.Unwrap()
	if want := map[string]string{"int": "a whole number", "uint64": "a whole number from 0",
		"float64": "a number", "bool": "true or false", "duration": "a time such as 50ms or 5s",
	}[f.Value.Type()]; want != "" {
		cause = fmt.Errorf("want %s", want)
	}
	return usagef("--%s %s: %w", f.Name, wrong.GetValue(), cause)
}

// run executes one command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root, error(nil)
	if len(args) > 1 && slices.ContainsFunc(args, func(a string) bool {
		return a == "-h" || a == "--help" // cobra would print the root's help for it
	}) {
		err = checkCommand(root, args)
	}
	if err == nil {
		cmd, err = root.ExecuteContextC(ctx)
	}
	var usage *usageError
	switch {
	case err == nil:
		return statusOK
	case errors.Is(err, errReported):
		return statusFailed
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "%s: interrupted\n", cmd.CommandPath())
		return statusInterrupted
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "%s: %v\n%s\nRun '%s --help' for what there is.\n",
			cmd.CommandPath(), sentence(err), "Usage: "+cmd.UseLine(), cmd.CommandPath())
		return statusUsage
	}
	fmt.Fprintf(stderr, "%s: %v\n", cmd.CommandPath(), sentence(err))
	return statusFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:               "sluice",
		Short:             "Move KV caches between memories, and measure it",
		Args:              noArgs,
		RunE:              func(c *cobra.Command, _ []string) error { return c.Help() },
		PersistentPreRunE: checkEmpty,

		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       readVersion(),
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.SetHelpCommand(newHelp())
	root.AddCommand(newReplay(), newLoad(), newBench(), newCache(), newDoctor(), newExplain(),
		newSimulate(), newVersion(), newPeer())
	return root
}

// newHelp is cobra's help command, but one that fails for a command that does not
// exist.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Say what a command does",
		RunE: func(c *cobra.Command, args []string) error {
			about, rest, err := c.Root().Find(args)
			if err != nil {
				return noArgs(c.Root(), args)
			}
			if len(rest) > 0 {
				return noArgs(about, rest)
			}
			about.InitDefaultHelpFlag()
			return about.Help()
		},
	}
}

// checkCommand refuses a first word that is no command.
func checkCommand(root *cobra.Command, args []string) error {
	root.InitDefaultHelpCmd()
	if c, rest, err := root.Find(args); err == nil && c == root &&
		!strings.HasPrefix(rest[0], "-") {
		return noArgs(root, rest)
	}
	return nil
}

// noArgs refuses words that are no flag, and names the commands where one was
// meant.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	if len(names) == 0 {
		return usagef("unexpected argument %q", args[0])
	}
	return usagef("unknown command %q: there are %s", args[0], strings.Join(names, ", "))
}

// wordsFrom wants so many words that are no flags.
func wordsFrom(least, most int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return usagef("want %d words, not %d", least, len(args))
		case len(args) > most:
			return usagef("unexpected argument %q", args[most])
		}
		return nil
	}
}
