// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// shows checks the bytes of a pin.
func shows(keys []cache.Key) func(blocks [][]byte) error {
	return func(blocks [][]byte) error {
		for k, key := range keys {
			if !bytes.Equal(bytes.Repeat(key[:], blockBytes/16), blocks[k]) {
				return errors.New("other bytes")
			}
		}
		return nil
	}
}

func until(is func() bool) {
	for !is() {
		runtime.Gosched()
	}
}

// TestPin: a client reads blocks in the memory of the server; it learns where they may not have
// been there all the time.
func TestPin(t *testing.T) {
	ctx := t.Context()
	c, s, path := openWhole(t)
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.fill(keys)
	_, err = u.Store(ctx, keys, u.place(0, 4))
	require.NoError(t, err)
	p, err := u.Pin(ctx, append(keysOf(1, 3), keysOf(99, 1)...), time.Minute)
	require.NoError(t, err)
	require.Equal(t, []cache.Outcome{cache.Done, cache.Done, cache.Done, cache.Missing},
		p.Outcomes())
	for from := uint64(100); from < 200; from += 10 {
		u.fill(keysOf(from, 10))
		_, err = u.Store(ctx, keysOf(from, 10), u.place(0, 10))
		require.NoError(t, err)
	}
	require.NoError(t, p.View(ctx, shows(keys[:3])))
	require.NoError(t, p.Close(ctx))
	require.Zero(t, c.Stats().Held)
	require.ErrorIs(t, p.View(ctx, shows(nil)), cache.ErrPinEnded)
	require.NoError(t, p.Close(ctx))

	p, err = u.Pin(ctx, keysOf(191, 2), time.Millisecond)
	require.NoError(t, err)
	require.ErrorIs(t, p.View(ctx, func([][]byte) error {
		until(func() bool { return c.Stats().Held == 0 })
		return nil
	}), cache.ErrPinEnded, "it ended meanwhile")
	require.NoError(t, p.Close(ctx))

	require.Nil(t, p.mem)

	p, err = u.Pin(ctx, keysOf(191, 2), time.Minute)
	require.NoError(t, err)
	require.ErrorIs(t, p.View(ctx, func(blocks [][]byte) error {
		require.NoError(t, p.Close(ctx)) // it keeps the mapping
		return shows(keysOf(191, 2))(blocks)
	}), cache.ErrPinEnded)
	require.Nil(t, p.mem)

	_, err = u.Pin(ctx, keysOf(191, 1), 0)
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = u.Pin(ctx, keysOf(191, 1), s.cfg.PinTTLMax+1)
	require.ErrorIs(t, err, engine.ErrBounds)
	require.NoError(t, u.Client.Close(ctx))
}

// TestMemoryThatGoes: a client whose server begins another memory file learns it, and lives on; a
// file that is not that of the server is refused.
func TestMemoryThatGoes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory")
	page := os.Getpagesize()
	require.NoError(t, os.WriteFile(path, make([]byte, 4*page), 0o600))
	var p Pin
	require.NoError(t, p.mapFile(path, [16]byte{}))
	p.blocks = [][]byte{p.mem[2*page:][:page]}
	require.NoError(t, os.Truncate(path, 0))
	require.ErrorIs(t, p.show(func(blocks [][]byte) error {
		_ = bytes.Clone(blocks[0])
		return nil
	}), driver.ErrFault)
	p.unmap(func() { p.ended = true })
	require.Nil(t, p.mem)
	require.NoError(t, os.WriteFile(path, make([]byte, 4*page), 0o600))
	require.ErrorContains(t, p.mapFile(path, [16]byte{1}), "not the memory file of the server")
	require.ErrorIs(t, p.mapFile(path+"x", [16]byte{}), os.ErrNotExist)
	require.NoError(t, unix.Mkfifo(path+"f", 0o600))
	require.ErrorContains(t, p.mapFile(path+"f", [16]byte{}), "is no file")
}

// TestPinsAreBounded: by their number, and by bytes; those of a client that is gone end.
func TestPinsAreBounded(t *testing.T) {
	ctx := t.Context()
	c, path := openServer(t)
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 8)
	u.fill(keys)
	_, err = u.Store(ctx, keys, u.place(0, 8))
	require.NoError(t, err)
	_, err = u.Pin(ctx, keys, time.Minute)
	require.ErrorIs(t, err, cache.ErrNoRoom)
	for range 64 {
		_, err = u.Pin(ctx, keysOf(50, 1), time.Minute) // of nothing
		require.NoError(t, err)
	}
	_, err = u.Pin(ctx, keysOf(50, 1), time.Minute)
	require.ErrorIs(t, err, engine.ErrBusy)
	other, err := openUser(ctx, path)
	require.NoError(t, err)
	p, err := other.Pin(ctx, keysOf(50, keysMax-2), time.Minute) // nothing, too
	require.NoError(t, err)
	_, err = other.Pin(ctx, keysOf(50, 3), time.Minute)
	require.ErrorIs(t, err, engine.ErrBusy)
	require.NoError(t, p.Close(ctx))
	_, err = other.Pin(ctx, keys[:2], time.Minute)
	require.NoError(t, err)
	require.EqualValues(t, 2*blockBytes, c.Stats().Held)
	require.NoError(t, other.Client.Close(ctx))
	until(func() bool { return c.Stats().Held == 0 })
	require.NoError(t, u.Client.Close(ctx))
}

// TestPinOfAnotherHost: who does not come by the Unix socket gets no pin, which would only keep
// memory.
func TestPinOfAnotherHost(t *testing.T) {
	c, s, _ := openWhole(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { served <- s.cfg.Engine.Serve(ctx, l) }()
	e, err := openEngine("far")
	require.NoError(t, err)
	u, err := Dial(ctx, e, "tcp", l.Addr().String())
	require.NoError(t, err)
	space, err := u.Namespace(ctx, "model", [32]byte{1})
	require.NoError(t, err)
	_, err = space.Pin(ctx, keysOf(1, 2), time.Minute)
	require.ErrorIs(t, err, engine.ErrNotSupported)
	require.Zero(t, c.Stats().Held)
	require.NoError(t, u.Close(ctx))
	cancel()
	<-served
}

// TestHints: hints and estimates pass a server.
func TestHints(t *testing.T) {
	ctx := t.Context()
	c, path := openServer(t)
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.fill(keys)
	_, err = u.Store(ctx, keys, u.place(0, 4))
	require.NoError(t, err)
	r, err := u.Hint(ctx, keysOf(1, 5), cache.Hint{Kind: cache.HintRetain, For: time.Hour})
	require.NoError(t, err)
	require.Equal(t, cache.HintResult{Applied: 4, Missing: 1}, r)
	r, err = u.Hint(ctx, keys, cache.Hint{Kind: cache.HintDemote})
	require.ErrorContains(t, err, "no disk")
	require.Equal(t, cache.HintResult{Refused: 4}, r)
	list, err := u.HintEnvelope(ctx, fmt.Appendf(nil, `{"protocol_version":"0.1","message_id":"m",`+
		`"actions":[{"action_id":"a","action_type":"kv.release","action_version":"1.0","payload":`+
		`{"block_hashes":["%s"]}}]}`, hex.EncodeToString(keys[0][:])))
	require.NoError(t, err)
	require.Equal(t, []cache.ActionOutcome{{ActionID: "a", Status: cache.ActionApplied,
		HintResult: cache.HintResult{Applied: 1}}}, list)
	require.EqualValues(t, 3*blockBytes, c.Stats().Held)
	_, err = u.HintEnvelope(ctx, []byte("garbage"))
	require.Error(t, err)
	outcomes, err := u.Prefetch(ctx, keysOf(4, 2))
	require.NoError(t, err)
	require.Equal(t, []cache.Outcome{cache.Done, cache.Missing}, outcomes)
	e, err := u.Estimate(ctx, keysOf(1, 5))
	require.NoError(t, err)
	require.Equal(t, [2]int{4, 0}, e.Blocks)
	require.Equal(t, 1, e.Missing)
	require.NoError(t, u.Client.Close(ctx))
}
