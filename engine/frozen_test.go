// SPDX-License-Identifier: Apache-2.0

package engine_test

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
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// decodeAt makes the test binary a process that serves this socket.
var decodeAt = flag.String("decode-at", "", "socket to serve; for the tests' own use")

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	switch {
	case *decodeAt != "":
		err = decodeProcess(*decodeAt)
	case *stressAt != "":
		err = stressProcess(*stressAt)
	case *engine.DeviceAt != "":
		err = engine.DeviceProcess(*engine.DeviceAt)
	default:
		os.Exit(m.Run())
	}
	if err != nil {
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
	e, err := engine.Open(engine.Config{Name: "decode", Backends: []driver.Backend{b}})
	if err != nil {
		return err
	}
	memory, err := engine.Alloc(1<<20, engine.AllocOptions{})
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

// startDecode starts the process and waits until it listens. The test's end ends it.
func startDecode(t *testing.T) (process *os.Process, socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "decode")
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
	limit := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
	defer limit.Stop()
	if line, err := bufio.NewReader(output).ReadString('\n'); line != decodeListens {
		t.Fatalf("the decode process says %q, %v: want %q", line, err, decodeListens)
	}
	return cmd.Process, socket
}

// TestTimedFrozenPeer stops the process at the other end. What needs its hand ends in
// time and provably, what does not goes on, and so does all that concerns others.
func TestTimedFrozenPeer(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	process, socket := startDecode(t)
	memory, err := engine.Alloc(1<<20, engine.AllocOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = memory.Close() })
	e := openPrefill(t, time.Minute)
	hasty := openPrefill(t, 300*time.Millisecond) // of it nothing is wanted but a timeout
	src, err := e.Register("src", memory.Segment())
	require.NoError(t, err)
	p, err := e.Dial(ctx, "unix", socket)
	require.NoError(t, err)
	late, err := hasty.Dial(ctx, "unix", socket)
	require.NoError(t, err)
	kv, err := p.Remote("kv")
	require.NoError(t, err)
	require.NoError(t, put(ctx, e, p, src, kv, 4))
	require.NoError(t, testkit.Freeze(process))
	if err := put(ctx, e, p, src, kv, 6); err != nil {
		t.Errorf("a write that needs no hand of the peer: %v", err)
	}
	stuck := fillUp(t, e, p)

	self, err := e.Self()
	require.NoError(t, err)
	own, err := self.Remote("src")
	require.NoError(t, err)
	if err := put(ctx, e, self, src, own, 1); err != nil {
		t.Errorf("a write to somebody else: %v", err)
	}
	outOfTime := fillUp(t, hasty, late)
	if err := outOfTime[len(outOfTime)-1].Wait(ctx); !errors.Is(err, engine.ErrTimeout) {
		t.Errorf("a message without room: %v", err)
	}
	for _, tr := range append(stuck, outOfTime...) {
		if err := tr.Abort(ctx); err != nil {
			t.Errorf("abort: %v", err)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
	stuck = fillUp(t, e, p)
	w, err := e.NewTransfer(p, engine.Write, engine.Route{})
	require.NoError(t, err)
	require.NoError(t, errors.Join(w.Add(src, 0, kv, 0, 1<<20), w.Notify(nil), w.Post()))
	if err := e.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	for _, tr := range append(stuck, w) {
		if err := tr.Wait(ctx); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a message after the ring was full: %v", err)
		}
	}
}

// put writes the first n bytes of a region.
func put(ctx context.Context, e *engine.Engine, p *engine.Peer, r *engine.Region, m *engine.Remote,
	n uint64) error {
	tr, err := e.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		return err
	}
	if err = tr.Add(r, 0, m, 0, n); err == nil {
		err = tr.Post()
	}
	if err == nil {
		err = tr.Wait(ctx)
	}
	return errors.Join(err, tr.Close())
}

// openPrefill opens an engine whose transfers have so long, and their ends as long as a test takes.
func openPrefill(t *testing.T, timeout time.Duration) *engine.Engine {
	t.Helper()
	b, err := shm.New(shm.Config{Failure: time.Minute}) // who is stopped is not lost
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "prefill", Backends: []driver.Backend{b},
		TransferTimeout: timeout, AbortGrace: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// fillUp posts more messages than the ring of a peer that reads none can hold. The
// last one has no room.
func fillUp(t *testing.T, e *engine.Engine, p *engine.Peer) (list []*engine.Transfer) {
	t.Helper()
	for range 16 { // of 32 KiB, for a ring of 256 KiB
		tr, err := e.NewTransfer(p, engine.Write, engine.Route{})
		require.NoError(t, err)
		require.NoError(t, errors.Join(tr.Notify(make([]byte, 32<<10)), tr.Post()))
		list = append(list, tr)
	}
	return list
}
