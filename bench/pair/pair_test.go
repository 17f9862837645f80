// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/procs"
)

// What the test binary is when it is the target.
const (
	targetRole  = "pair-target"
	brokenRole  = "pair-broken"
	slowRole    = "pair-slow"
	brokenCause = "no backend today"
)

func TestMain(m *testing.M) {
	opens := map[string]OpenFunc{
		targetRole: openShm,
		brokenRole: func(string, int) ([]driver.Backend, error) {
			return nil, errors.New(brokenCause)
		},
		slowRole: func(string, int) ([]driver.Backend, error) { select {} },
	}
	if len(os.Args) != 2 || opens[os.Args[1]] == nil {
		os.Exit(m.Run())
	}
	c, err := procs.Attach()
	if err == nil {
		err = Target(c, opens[os.Args[1]])
	}
	if err != nil && c != nil && c.Context().Err() == nil {
		err = errors.Join(err, c.Send(procs.KindError, err.Error()))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func openShm(string, int) ([]driver.Backend, error) {
	b, err := shm.New(shm.Config{})
	return []driver.Backend{b}, err
}

func config(role string) Config {
	return Config{
		Backend: "shm", Only: "shm", Threads: 1, Memory: bench.HostMemory, Local: 1 << 20,
		Remote: 1 << 20, Open: openShm,
		Start: func(files ...*os.File) (*procs.Child, error) {
			return procs.Start("target", []string{role}, files...)
		},
	}
}

func TestPair(t *testing.T) {
	p, err := Open(t.Context(), config(targetRole))
	require.NoError(t, err)
	defer p.Close()
	r, err := bench.Run(t.Context(), p.Link, bench.Shape{Op: driver.Write, Size: 4096, Batch: 4,
		Threads: 1}, bench.Options{Rounds: 1, Bare: true})
	require.NoError(t, err)
	require.Positive(t, r.GBps)
	m := NewMessages(64, true, nil)
	require.NoError(t, m.Measure(t.Context(), p, 1))
	list := m.Results("shm")
	require.Len(t, list, 2)
	for _, r := range list {
		require.Positive(t, r.P50us)
		require.Len(t, r.Baselines, 1)
	}
	landings, err := p.Landings(t.Context(), 8, time.Microsecond)
	require.NoError(t, err)
	require.NotEmpty(t, landings.All())
	require.Nil(t, p.Rails())
}

// TestPairWithoutATarget: what the target says is the error.
func TestPairWithoutATarget(t *testing.T) {
	_, err := Open(t.Context(), config(brokenRole))
	require.EqualError(t, err, "target process: "+brokenCause)
}

// TestTimedTargetFrozenBeforeItsHandshakeIsNamed: once it is ready, silence is enough.
func TestTimedTargetFrozenBeforeItsHandshakeIsNamed(t *testing.T) {
	c := config(targetRole)
	start, target := c.Start, (*procs.Child)(nil)
	c.Start = func(files ...*os.File) (child *procs.Child, err error) {
		target, err = start(files...)
		return target, err
	}
	c.Open = func(backend string, threads int) ([]driver.Backend, error) { // it is ready
		if err := syscall.Kill(target.PID, syscall.SIGSTOP); err != nil {
			return nil, err
		}
		return openShm(backend, threads)
	}
	begin := time.Now()
	_, err := Open(t.Context(), c)
	require.ErrorIs(t, err, errSilent)
	require.ErrorContains(t, err, fmt.Sprintf("target process (pid %d) has not answered",
		target.PID))
	require.Less(t, time.Since(begin), startLimit/2)
}

// TestTimedStoppedWhileItStarts: a target that is stopped before it is ready is named soon,
// although one that is slow to start has longer.
func TestTimedStoppedWhileItStarts(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), startLimit/2)
	defer cancel()
	c := config(slowRole)
	start, pid := c.Start, 0
	c.Start = func(files ...*os.File) (*procs.Child, error) {
		child, err := start(files...)
		if err == nil {
			pid = child.PID
			err = syscall.Kill(pid, syscall.SIGSTOP)
		}
		return child, err
	}
	_, err := Open(ctx, c)
	require.ErrorContains(t, err, fmt.Sprintf("target process (pid %d) has not answered for", pid))
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "it is left behind")
}
