// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/procs"
)

// roles are what a child process of this command can be.
var roles = map[string]func(*procs.Control, networkFlags) error{
	"bench-target": benchTarget,
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

// saidError is the error of a child in its own words.
type saidError struct{ name, text string }

func (e *saidError) Error() string { return fmt.Sprintf("%s process: %s", e.name, e.text) }

// childError reads the KindError message of a child.
func childError(c *procs.Child, m *procs.Message) error {
	var text string
	if err := m.Decode(&text); err != nil {
		return err
	}
	return &saidError{c.Name, strings.TrimSpace(text)}
}

// await returns the next message of a child, which must be of that kind, and
// reads its body into v unless v is nil.
func await(ctx context.Context, c *procs.Child, kind string, v any) error {
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the %s process (pid %d): %w", c.Name, c.PID, context.Cause(ctx))
		case m, ok := <-c.Messages():
			switch {
			case !ok && c.ExitError() != nil:
				return c.ExitError()
			case !ok:
				return fmt.Errorf("%s process (pid %d) ended early", c.Name, c.PID)
			case m.Kind == procs.KindError:
				return childError(c, &m)
			case m.Kind != kind:
				return fmt.Errorf("%s process sent %q, want %q", c.Name, m.Kind, kind)
			case v == nil:
				return nil
			}
			return m.Decode(v)
		}
	}
}
