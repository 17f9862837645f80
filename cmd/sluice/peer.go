// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/replay"
)

// opener opens backends that work between two processes.
type opener = func(name string, threads int) ([]driver.Backend, error)

// roles has the function of a child process of this command by its role.
var roles = map[string]func(*proc.Control, opener) error{
	"replay-prefill": func(c *proc.Control, open opener) error { return replay.Rank(c, open) },
	"replay-decode":  func(c *proc.Control, open opener) error { return replay.Rank(c, open) },
}

// errReported is a child's error that its parent has been told.
var errReported = errors.New("reported to the parent process")

// newPeer is the hidden command that child processes run.
func newPeer() *cobra.Command {
	c := &cobra.Command{
		Use:    "peer ROLE BACKEND",
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 || roles[args[0]] == nil {
				return usagef("unknown role %q", args)
			}
			var spec backendSpec
			if err := spec.Set(args[1]); err != nil {
				return &usageError{err}
			}
			c, err := proc.Attach()
			if err != nil {
				return err
			}
			signal.Ignore(syscall.SIGINT, syscall.SIGHUP) // the parent ends its children in order
			err = roles[args[0]](c, func(_ string, threads int) ([]driver.Backend, error) {
				return spec.open(threads, driver.SameHost)
			})
			if err == nil || c.Context().Err() != nil {
				return nil // the parent wished so
			}
			return report(c, sentence(err))
		},
	}
	return c
}

// report tells the parent why a role failed.
func report(c *proc.Control, why string) error {
	if err := c.Send(proc.KindError, why); err != nil {
		return errors.Join(errors.New(why), err)
	}
	return errReported
}
