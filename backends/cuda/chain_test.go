// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
)

// chainVariable makes the test binary the other process: a folder, and what carries the bytes.
const chainVariable, carrierVariable = "SLUICE_CHAIN_AT", "SLUICE_CHAIN_BY"

const chainBytes = 5 << 20

// direct is shm as the carrier of what cuda cannot carry itself, with Config.Peers.
const direct = "cuda and shm"

// chainEnd is an engine with memory of a device, a file, and a backend between processes that
// knows of neither.
type chainEnd struct {
	e    *engine.Engine
	hbm  driver.Segment
	free func() error
}

func carrierOf(name string) (driver.Backend, error) {
	switch name {
	case "shm", direct:
		return shm.New(shm.Config{})
	case "tcp":
		return tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true})
	}
	return ucx.New(ucx.Config{})
}

func openChainEnd(carrier string) (*chainEnd, error) {
	c, err := carrierOf(carrier)
	if err != nil {
		return nil, err
	}
	cfg := testConfig()
	cfg.Peers = carrier == direct
	b, err := New(cfg)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	disk, err := posix.New(posix.Config{})
	if err != nil {
		return nil, errors.Join(err, c.Close(), b.Close())
	}
	seg, owner, err := b.AllocDevice(0, chainBytes)
	if err != nil {
		return nil, errors.Join(err, c.Close(), b.Close(), disk.Close())
	}
	e, err := engine.Open(engine.Config{Name: carrier, Backends: []driver.Backend{c, b, disk}})
	if err != nil {
		return nil, errors.Join(err, owner.Close())
	}
	return &chainEnd{e, seg, func() error { return errors.Join(e.Close(), owner.Close()) }}, nil
}

// chainProcess serves a region of device memory and a file until its input ends.
func chainProcess(dir, carrier string) error {
	end, err := openChainEnd(carrier)
	if err != nil {
		return err
	}
	f, err := posix.Open(filepath.Join(dir, "file"), posix.OpenOptions{Create: true,
		Len: chainBytes})
	if err != nil {
		return err
	}
	if _, err := end.e.Register("hbm", end.hbm); err != nil {
		return err
	}
	if _, err := end.e.Register("file", f.Segment()); err != nil {
		return err
	}
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		return err
	}
	fmt.Println("listens")
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	return end.e.Serve(context.Background(), l)
}

// startChain starts that process.
func startChain(t *testing.T, carrier string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), chainVariable+"="+dir, carrierVariable+"="+carrier)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = input.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	end := time.AfterFunc(4*limit, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { end.Stop() })
	if line, err := bufio.NewReader(output).ReadString('\n'); line != "listens\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return dir
}

// TestChainsBetweenProcesses moves memory of a device to that of another process and to a file of
// it, and back, where no single backend can: device, DRAM, whatever carries it, DRAM, device or
// disk. With Config.Peers one can from device to device.
func TestChainsBetweenProcesses(t *testing.T) {
	for _, carrier := range []string{"shm", "ucx", "tcp", direct} {
		t.Run(carrier, func(t *testing.T) {
			end, err := openChainEnd(carrier)
			if err != nil {
				drivertest.SkipIfUnavailable(t, err)
			}
			defer func() {
				if err := end.free(); err != nil {
					t.Error(err)
				}
			}()
			dir := startChain(t, carrier)
			ctx, cancel := context.WithTimeout(context.Background(), 2*limit)
			defer cancel()
			p, err := end.e.Dial(ctx, "unix", filepath.Join(dir, "socket"))
			require.NoError(t, err)
			local, err := end.e.Register("local", end.hbm)
			require.NoError(t, err)
			for _, there := range []string{"hbm", "file"} {
				by := engine.Staged
				if carrier == direct && there == "hbm" {
					by = "cuda"
				}
				roundTrip(ctx, t, end, p, local, there, by)
			}
			onDisk, err := os.ReadFile(filepath.Join(dir, "file"))
			require.NoError(t, err)
			if want := readCard(t, end.hbm); !bytes.Equal(onDisk, want) {
				t.Error("the file holds other bytes than the device")
			}
		})
	}
}

// roundTrip writes all of the device's memory there, and has it come back, entries of 656 bytes in
// another order.
func roundTrip(ctx context.Context, t *testing.T, end *chainEnd, p *engine.Peer,
	local *engine.Region, there, by string) {
	t.Helper()
	m, err := p.Remote(there)
	require.NoError(t, err)
	x, err := end.e.Explain(p, local, m)
	if err != nil || x.Chosen != by {
		t.Fatalf("explained, %v:\n%v", err, &x)
	}
	t.Log(x.Candidates[len(x.Candidates)-1].Reason)
	want := make([]byte, chainBytes)
	_, _ = rand.NewChaCha8([32]byte{byte(len(there))}).Read(want) // never fails
	writeCard(t, end.hbm, want)
	run := func(op engine.Op, add func(*engine.Transfer) error) {
		t.Helper()
		tr, err := end.e.NewTransfer(p, op, engine.Route{})
		if err == nil {
			err = errors.Join(add(tr), tr.Post())
		}
		if err == nil {
			err = errors.Join(tr.Wait(ctx), tr.Close())
		}
		if err != nil {
			t.Fatalf("%v %s: %v", op, there, err)
		}
	}
	run(engine.Write, func(tr *engine.Transfer) error { return tr.Add(local, 0, m, 0, chainBytes) })
	writeCard(t, end.hbm, make([]byte, chainBytes))
	pages := engine.Pages{Count: chainBytes / 656, EntryLen: 656, LocalStride: 656,
		RemoteStride: 656}
	for i := range uint32(pages.Count) {
		pages.Local, pages.Remote = append(pages.Local, (i*7)%uint32(pages.Count)),
			append(pages.Remote, (i*5)%uint32(pages.Count))
	}
	run(engine.Read, func(tr *engine.Transfer) error { return tr.AddPages(local, m, pages) })
	got := readCard(t, end.hbm)
	all := pages.Pattern()
	for i := range pages.Count {
		if !bytes.Equal(got[all.Local.At(i):][:656], want[all.Remote.At(i):][:656]) {
			t.Fatalf("%s: entry %d has come back with other bytes", there, i)
		}
	}
	run(engine.Write, func(tr *engine.Transfer) error { return tr.Add(local, 0, m, 0, chainBytes) })
}

func writeCard(t *testing.T, seg driver.Segment, b []byte) {
	t.Helper()
	d, err := openCard(seg.Device)
	if err == nil {
		err = d.Write(seg.Addr, b)
	}
	require.NoError(t, err)
}

func readCard(t *testing.T, seg driver.Segment) []byte {
	t.Helper()
	b := make([]byte, seg.Len)
	d, err := openCard(seg.Device)
	if err == nil {
		err = d.Read(b, seg.Addr)
	}
	require.NoError(t, err)
	return b
}
