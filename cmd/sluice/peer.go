// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench/pair"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/procs"
)

// roles are what a child process of this command can be.
var roles = map[string]func(*procs.Control, networkFlags) error{
	"bench-target": func(c *procs.Control, n networkFlags) error {
		return pair.Target(c, openForChild(n))
	},
}

// openForChild opens what works between two processes.
func openForChild(n networkFlags) func(name string, threads int) ([]driver.Backend, error) {
	return func(name string, threads int) ([]driver.Backend, error) {
		n.give(name)
		return openBackends(name, driver.SameHost, openOptions{threads: threads, ucx: n.ucx,
			rdma: n.rdma, tcp: n.tcp})
	}
}

// errReported is a child's error that its parent has been told.
var errReported = errors.New("reported to the parent process")

// newPeer is the hidden command that child processes run.
func newPeer() *cobra.Command {
	var n networkFlags
	c := &cobra.Command{
		Use:    "peer ROLE",
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			role, ok := roles[strings.Join(args, " ")]
			if !ok {
				return usagef("unknown role %q", args)
			}
			c, err := procs.Attach()
			if err != nil {
				return err
			}
			signal.Ignore(syscall.SIGINT, syscall.SIGHUP) // the parent ends its children in order
			err = role(c, n)
			if err == nil || c.Context().Err() != nil {
				return nil // the parent wished so
			}
			return report(c, sentence(cmd, err))
		},
	}
	n.register(c)
	return c
}

// report tells the parent why a role failed.
func report(c *procs.Control, why string) error {
	if err := c.Send(procs.KindError, why); err != nil {
		return errors.Join(errors.New(why), err)
	}
	return errReported
}
