// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// chainEnd is an engine with DRAM and a file, which reaches others by tcp alone.
type chainEnd struct {
	*engine.Engine
	dram, file *engine.Region
	path       string
	tcp        driver.Backend
}

const chainBytes = 6 << 20

func newChainEnd(t *testing.T, name string, rules ...fault.Rule) *chainEnd {
	t.Helper()
	disk, err := posix.New(posix.Config{})
	require.NoError(t, err)
	net, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0",
		Failure: 5 * time.Second})
	require.NoError(t, err)
	c := &chainEnd{tcp: net}
	if len(rules) > 0 {
		c.tcp, err = fault.Wrap(net, 11, rules...)
		require.NoError(t, err)
	}
	c.Engine, err = engine.Open(engine.Config{Name: name, Backends: []driver.Backend{c.tcp, disk},
		TransferTimeout: 3 * time.Second})
	require.NoError(t, err)
	c.path = filepath.Join(t.TempDir(), name)
	content := make([]byte, chainBytes)
	source := rand.NewChaCha8([32]byte{byte(len(name)), 3})
	_, _ = source.Read(content)
	require.NoError(t, os.WriteFile(c.path, content, 0o600))
	f, err := os.OpenFile(c.path, os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := engine.Alloc(chainBytes, engine.AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
		_, _ = m.Close(), f.Close()
	})
	c.dram, err = c.Register("dram", m.Segment())
	if err == nil {
		c.file, err = c.Register("file", driver.Segment{Kind: driver.File, FD: int(f.Fd()),
			Len: chainBytes})
	}
	require.NoError(t, err)
	return c
}

// paint puts new bytes into a region.
func (c *chainEnd) paint(t *testing.T, r *engine.Region, seed int) {
	t.Helper()
	b := make([]byte, chainBytes)
	source := rand.NewChaCha8([32]byte{byte(seed), 9})
	_, _ = source.Read(b)
	if r == c.dram {
		copy(r.Bytes(), b)
		return
	}
	f, err := os.OpenFile(c.path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(b, 0)
		err = errors.Join(err, f.Close())
	}
	require.NoError(t, err)
}

// content is what lies in a region now.
func (c *chainEnd) content(t *testing.T, r *engine.Region) []byte {
	t.Helper()
	if r == c.dram {
		return r.Bytes()
	}
	b, err := os.ReadFile(c.path)
	require.NoError(t, err)
	return b
}

// TestChainsOverTCP moves between files and memory of two engines through DRAM and tcp, on a good
// line and on one that delays, drops, fails and flaps. What is said to be done is right, and in the
// end everything is.
func TestChainsOverTCP(t *testing.T) {
	for line, rules := range map[string][]fault.Rule{
		"good": nil,
		"bad": {
			{On: fault.Batch, Chance: 0.4, Do: fault.Delay(2*time.Millisecond, 2*time.Millisecond)},
			{On: fault.Write, Chance: 0.01, Do: fault.Drop()},
			{On: fault.Batch, Chance: 0.01, Do: fault.Fail(driver.ErrPeerLost)},
			{On: fault.Write, Chance: 0.3, Do: fault.Late(time.Millisecond, 0)},
			{On: fault.Batch, Every: 150, Do: fault.Flap(30 * time.Millisecond)},
		},
	} {
		t.Run(line, func(t *testing.T) {
			testkit.CheckLeaks(t, hostmem.InUse)
			near, far := newChainEnd(t, "near", rules...), newChainEnd(t, "farther")
			for i, way := range []struct {
				op    engine.Op
				local *engine.Region
				name  string
				there *engine.Region
			}{
				{engine.Write, near.file, "dram", far.dram}, // file -> DRAM -> tcp -> DRAM
				{engine.Read, near.dram, "file", far.file},  // the same from the other side
				{engine.Write, near.dram, "file", far.file},
				{engine.Read, near.file, "dram", far.dram},
				{engine.Write, near.file, "file", far.file},
			} {
				what := fmt.Sprintf("%v of %v by %v", way.op, way.there.Kind(), way.local.Kind())
				if way.op == engine.Write {
					near.paint(t, way.local, i)
				} else {
					far.paint(t, way.there, i)
				}
				tries := 0
				for err := errors.New("none yet"); err != nil; tries++ {
					if tries == 40 {
						t.Fatalf("%s: in %d tries: %v", what, tries, err)
					}
					err = chainOnce(near, far, way.op, way.local, way.name)
				}
				if !bytes.Equal(near.content(t, way.local), far.content(t, way.there)) {
					t.Errorf("%s: other bytes, and no error, after %d tries", what, tries)
				}
			}
			if f, ok := near.tcp.(*fault.Backend); ok {
				fired := uint64(0)
				for _, n := range f.Fired() {
					fired += n
				}
				if fired < 20 {
					t.Errorf("%d faults: the line was not bad", fired)
				}
			}
		})
	}
}

// chainOnce connects, moves a whole region and hangs up.
func chainOnce(near, far *chainEnd, op engine.Op, local *engine.Region, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	d, err := far.Describe()
	if err != nil {
		return err
	}
	p, err := near.Connect(ctx, d)
	if err != nil {
		time.Sleep(10 * time.Millisecond) // it flaps
		return err
	}
	defer p.Close()
	m, err := p.Remote(name)
	if err != nil {
		return err
	}
	x, err := near.NewTransfer(p, op, engine.Route{Only: engine.Staged})
	if err != nil {
		return err
	}
	defer x.Close()
	if err := x.Add(local, 0, m, 0, chainBytes); err != nil {
		return err
	}
	if err := x.Post(); err != nil {
		return err
	}
	err = x.Wait(ctx)
	return errors.Join(err, x.Abort(context.Background()))
}
