// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/process"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// patience bounds what must happen but not when.
const patience = 30 * time.Second

type mourner chan struct{}

func (m mourner) died() { m <- struct{}{} }

// child starts a process that does nothing, and ends with the test.
func child(t *testing.T) (*exec.Cmd, process.ID) {
	t.Helper()
	c := exec.Command("sleep", "60")
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	start, err := process.StartOf(c.Process.Pid)
	require.NoError(t, err)
	return c, process.ID{PID: uint32(c.Process.Pid), Start: start}
}

func TestProcess(t *testing.T) {
	p, err := process.This()
	if err != nil || p.PID != uint32(os.Getpid()) || p.Start == 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	fd, err := p.Open()
	require.NoError(t, err)
	_ = unix.Close(fd)
	for what, other := range map[string]process.ID{
		"one that had our number before": {PID: p.PID, Start: p.Start - 1},
		"none":                           {PID: 1 << 30, Start: p.Start},
		"number 0":                       {PID: 0, Start: p.Start},
	} {
		if fd, err := other.Open(); !errors.Is(err, driver.ErrPeerLost) {
			t.Errorf("%s: descriptor %d, %v", what, fd, err)
		}
	}
	if a, err := process.Host(); err != nil || a == [8]byte{} {
		t.Errorf("host %x, %v", a, err)
	}
}

func TestDeaths(t *testing.T) {
	leak.Check(t)
	self, err := process.This()
	require.NoError(t, err)
	var d deaths
	d.init(self)
	defer d.close()
	c, p := child(t)
	first, second, gone := make(mourner, 2), make(mourner, 2), make(mourner, 2)
	for _, m := range []mourner{first, second, gone} {
		require.NoError(t, d.add(p, m))
	}
	if err := d.add(self, first); err != nil || len(d.watches) != 1 {
		t.Errorf("our own process: %v, %d watches", err, len(d.watches))
	}
	d.remove(p, gone)
	require.NoError(t, c.Process.Kill())
	for _, m := range []mourner{first, second} {
		select {
		case <-m:
		case <-time.After(patience):
			t.Fatal("nobody was told of a death")
		}
	}
	time.Sleep(5 * time.Millisecond)
	if len(first)+len(second)+len(gone) > 0 {
		t.Error("told twice, or after remove")
	}
	if err := d.add(p, first); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("watch a dead process: %v", err)
	}
}

// TestDeathsClose ends watches whose processes go on.
func TestDeathsClose(t *testing.T) {
	leak.Check(t)
	var d deaths
	d.init(process.ID{})
	_, p := child(t)
	m := make(mourner, 1)
	require.NoError(t, d.add(p, m))
	_, other := child(t)
	require.NoError(t, d.add(other, m))
	d.remove(other, m)
	d.close()
	if err := d.add(p, m); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("watch after close: %v", err)
	}
	if len(m) > 0 {
		t.Error("told of a death that was none")
	}
}
