// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// decodeAt makes the test binary a process that serves this socket.
var decodeAt = flag.String("decode-at", "", "socket to serve; for the tests' own use")

func TestMain(m *testing.M) {
	flag.Parse()
	if *decodeAt == "" {
		os.Exit(m.Run())
	}
	if err := decodeProcess(*decodeAt); err != nil {
		fmt.Fprintln(os.Stderr, "decode process:", err)
		os.Exit(1)
	}
}

// decodeListens is the line that a decode process prints when its socket takes
// connections. The socket's file is no sign of that: it is there before.
const decodeListens = "listens\n"

// decodeProcess serves a region of 1 MiB and reads no message, until it is killed
// or its input ends.
func decodeProcess(socket string) error {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return err
	}
	e, err := Open(Config{Name: "decode", Backends: []Backend{b}})
	if err != nil {
		return err
	}
	memory, err := e.Alloc(1<<20, AllocOptions{})
	if err != nil {
		return err
	}
	if _, err := e.Register("kv", memory.Segment()); err != nil {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	fmt.Print(decodeListens)
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	return e.Serve(context.Background(), l)
}

// TestTimedFrozenPeer stops the process at the other end. What needs its hand ends in
// time and provably, what does not goes on, and so does all that concerns others.
func TestTimedFrozenPeer(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	socket := filepath.Join(t.TempDir(), "decode")
	cmd := exec.Command(os.Args[0], "-decode-at", socket)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = input.Close()
		_ = cmd.Process.Kill() // frozen or not
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(output).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, decodeListens, line)

	prefill := func(timeout time.Duration) (*Engine, *Peer) {
		e := open(t, "prefill", func(c *Config) {
			b, err := shm.New(shm.Config{Failure: time.Minute}) // who is stopped is not lost
			require.NoError(t, err)
			c.Backends, c.TransferTimeout, c.AbortGrace = []Backend{b}, timeout, 10*time.Second
		})
		p, err := e.Dial(within(t), "unix", socket)
		require.NoError(t, err)
		return e, p
	}
	// More messages than the ring of a peer that reads none can hold: the last has no room.
	fillUp := func(p *Peer) (list []*Transfer) {
		for range 16 { // of 32 KiB, for a ring of 256 KiB
			tr := transfer(t, p, Write)
			check(t, errors.Join(tr.Notify(make([]byte, 32<<10)), tr.Post()))
			list = append(list, tr)
		}
		return list
	}
	e, p := prefill(time.Minute)
	_, late := prefill(300 * time.Millisecond) // of it nothing is wanted but a timeout
	src := register(t, e, "src", 1<<20)
	kv := remote(t, p, "kv")
	check(t, put(p, src, kv, 4))
	check(t, testkit.Freeze(cmd.Process))
	require.NoError(t, put(p, src, kv, 6), "a write that needs no hand of the peer")
	stuck := fillUp(p)

	self, err := e.Self()
	check(t, err)
	require.NoError(t, put(self, src, remote(t, self, "src"), 1), "a write to another peer")
	outOfTime := fillUp(late)
	require.ErrorIs(t, outOfTime[len(outOfTime)-1].Wait(within(t)), ErrTimeout,
		"a message without room")
	for _, tr := range append(stuck, outOfTime...) {
		require.NoError(t, errors.Join(tr.Abort(within(t)), tr.Close()), "abort")
	}
	stuck = fillUp(p)
	w := transfer(t, p, Write)
	check(t, errors.Join(w.Add(src, 0, kv, 0, 1<<20), w.Notify(nil), w.Post()))
	require.NoError(t, e.Close(), "close")
	for _, tr := range append(stuck, w) {
		if err := tr.Wait(within(t)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a message after the ring was full: %v", err)
		}
	}
}
