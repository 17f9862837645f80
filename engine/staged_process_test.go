// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// DeviceAt makes the test binary a process that serves memory of a device at this socket.
var DeviceAt = flag.String("device-at", "", "socket to serve; for the tests' own use")

// DeviceProcess is that process. It holds the device's copies back once a byte has come on
// its input, and ends with it.
func DeviceProcess(socket string) error {
	e, dev, m, err := deviceEngine(Config{Name: "decode"})
	if err != nil {
		return err
	}
	if _, err := e.Register("hbm", dev.own(m.Bytes())); err != nil {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	fmt.Println("listens")
	go func() {
		if _, err := os.Stdin.Read(make([]byte, 1)); err == nil {
			dev.keep()
			fmt.Println("holds")
			for dev.kept() == 0 {
				time.Sleep(time.Millisecond)
			}
			fmt.Println("has one in hand")
			_, _ = os.Stdin.Read(make([]byte, 1))
		}
		os.Exit(0)
	}()
	return e.Serve(context.Background(), l)
}

// deviceEngine has shm for the way between processes, and a device of which that knows nothing.
func deviceEngine(cfg Config) (*Engine, *device, *Memory, error) {
	s, err := shm.New(shm.Config{})
	if err != nil {
		return nil, nil, nil, err
	}
	dev, err := openDevice("device", driver.HBM)
	if err != nil {
		return nil, nil, nil, err
	}
	cfg.Backends = []driver.Backend{s, dev}
	e, err := Open(cfg)
	if err != nil {
		return nil, nil, nil, err
	}
	m, err := Alloc(hostBytes, AllocOptions{Purpose: "device"})
	return e, dev, m, err
}

// far is such a process.
type far struct {
	process *os.Process
	input   io.Writer
	output  *bufio.Reader
	peer    *Peer
	hbm     *Remote
}

// startFar starts one and connects the engine.
func startFar(t *testing.T, e *Engine) *far {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "far")
	cmd := exec.Command(os.Args[0], "-device-at", socket)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	check(t, err)
	output, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		_ = input.Close()
		_ = cmd.Process.Kill() // frozen or not
		_ = cmd.Wait()
	})
	end := time.AfterFunc(2*limit, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { end.Stop() })
	f := &far{process: cmd.Process, input: input, output: bufio.NewReader(output)}
	f.expect(t, "listens")
	f.peer, err = e.Dial(within(t), "unix", socket)
	check(t, err)
	f.hbm = remote(t, f.peer, "hbm")
	return f
}

func (f *far) expect(t *testing.T, want string) {
	t.Helper()
	if line, err := f.output.ReadString('\n'); line != want+"\n" {
		t.Fatalf("the other process says %q, %v: want %q", line, err, want)
	}
}

// hold has the device of the other process keep the next copies.
func (f *far) hold(t *testing.T) {
	t.Helper()
	_, err := f.input.Write([]byte{1})
	check(t, err)
	f.expect(t, "holds")
}

// near is the engine of this process, with memory of a device.
func near(t *testing.T, cfg Config) (*Engine, *Region, []byte) {
	t.Helper()
	cfg.Name = "prefill"
	e, dev, m, err := deviceEngine(cfg)
	check(t, err)
	t.Cleanup(func() {
		if err := errors.Join(e.Close(), m.Close()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	r, err := e.Register("hbm", dev.own(m.Bytes()))
	check(t, err)
	return e, r, m.Bytes()
}

// TestStagedBetweenProcesses writes memory of a device to that of another process, and reads
// it back.
func TestStagedBetweenProcesses(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	e, hbm, b := near(t, Config{})
	f := startFar(t, e)
	fill(b, 3)
	want := bytes.Clone(b)
	w, r := transfer(t, f.peer, Write), transfer(t, f.peer, Read)
	check(t, w.Add(hbm, 0, f.hbm, 0, hostBytes))
	run(t, w)
	clear(b)
	pages := Pages{Count: hostBytes / 656, EntryLen: 656, LocalStride: 656, RemoteStride: 656}
	for i := range uint32(hostBytes / 656) {
		pages.Local, pages.Remote = append(pages.Local, i), append(pages.Remote, hostBytes/656-1-i)
	}
	check(t, r.AddPages(hbm, f.hbm, pages))
	run(t, r)
	at := pages.Pattern()
	for i := range pages.Count {
		if !bytes.Equal(b[at.Local.At(i):][:656], want[at.Remote.At(i):][:656]) {
			t.Fatalf("entry %d has come back with other bytes", i)
		}
	}
	check(t, f.peer.Close())
}

// TestStagedKilledPeer kills the other process with pieces in its hand.
func TestStagedKilledPeer(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	e, hbm, _ := near(t, Config{AbortGrace: 200 * time.Millisecond})
	f := startFar(t, e)
	tr := transfer(t, f.peer, Write)
	check(t, tr.Add(hbm, 0, f.hbm, 0, hostBytes))
	run(t, tr)
	f.hold(t)
	check(t, tr.Post())
	f.expect(t, "has one in hand")
	check(t, f.process.Kill())
	if err := tr.Wait(within(t)); !errors.Is(err, ErrPeerLost) {
		t.Errorf("outcome %v", err)
	}
	check(t, f.peer.Close())
}

// TestStagedLateHop kills the other process while this side has not heard yet that the hop to
// it has ended: the loss of the connection is heard first.
func TestStagedLateHop(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	e, hbm, _ := near(t, Config{AbortGrace: 200 * time.Millisecond})
	f := startFar(t, e)
	tr := transfer(t, f.peer, Write)
	check(t, tr.Add(hbm, 0, f.hbm, 0, hostBytes))
	run(t, tr)
	f.hold(t)
	check(t, tr.Post())
	f.expect(t, "has one in hand")
	sp := f.peer.chains()
	var late []*slot
	tell := func(do func()) {
		done := make(chan struct{})
		if !sp.loop.push(func() { do(); close(done) }) {
			t.Fatal("the stager has ended")
		}
		<-done
	}
	for end := time.Now().Add(10 * time.Second); len(late) == 0 && time.Now().Before(end); {
		tell(func() {
			for _, s := range sp.slots {
				if s.step == atHand {
					s.step = atBy
					late = append(late, s)
				}
			}
		})
	}
	check(t, f.process.Kill())
	<-f.peer.Lost()
	tell(func() {
		for _, s := range late {
			s.proceed()
		}
	})
	if err := tr.Wait(within(t)); !errors.Is(err, ErrPeerLost) || len(late) == 0 {
		t.Errorf("outcome %v, %d pieces were late", err, len(late))
	}
	check(t, f.peer.Close())
}
