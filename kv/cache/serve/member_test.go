// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
)

// told is a Member that keeps what it is told, and tells what a test has it tell.
type told struct {
	uses    chan *Use
	digests chan string
}

func (m *told) Used(u *Use)    { m.uses <- u }
func (m *told) Report() Copies { return Copies{Segments: 7} }
func (m *told) Digest(ctx context.Context, since []byte) (digest, next []byte, err error) {
	select {
	case d := <-m.digests:
		return []byte(d), append(since, '+'), nil
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}

func openMember(t *testing.T) (*told, *Server, *user) {
	m := &told{make(chan *Use, 16), make(chan string, 16)}
	_, s, path := openWhole(t, func(cfg *Config) { cfg.Member = m })
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, u.Client.Close(context.Background())) })
	return m, s, u
}

// TestUses: the member of a server is told of the loads and stores that name segments.
func TestUses(t *testing.T) {
	m, s, u := openMember(t)
	require.Equal(t, 7, s.Report().Copies.Segments)
	keys := keysOf(1, 3)
	u.storeAndLoad(t, keys) // of no cluster
	p := u.place(0, 3)
	p.Segments = []Segment{{keys[0], 1, 1}, {keys[1], 2, 2}}
	_, err := u.Load(t.Context(), keys, p)
	require.NoError(t, err)
	p.Copy = true
	_, err = u.Store(t.Context(), keys, p)
	require.NoError(t, err)
	space := &SpaceName{"model", [32]byte{1}, cache.DigestOf("model", [32]byte{1})}
	require.Equal(t, &Use{space, false, false, blockBytes, keys, p.Segments, all(cache.Done, 3)},
		<-m.uses)
	require.Equal(t, &Use{space, true, true, blockBytes, keys, p.Segments, all(cache.Known, 3)},
		<-m.uses)
	require.Empty(t, m.uses)
	for _, bad := range [][]Segment{{{keys[0], 0, 2}}, {{keys[0], 0, 4}}, {{keys[0], 0, 0}},
		{{keys[0], 1<<32 - 1, 3}}, {{keys[0], 0, 3}, {keys[0], 0, 1}}} {
		p.Segments = bad
		_, err = u.Load(t.Context(), keys, p)
		require.ErrorIs(t, err, engine.ErrBounds)
		_, _, _, err = readPlace(appendPlace(nil, 1, &p), 3)
		require.ErrorIs(t, err, engine.ErrCorrupt)
	}
}

// TestDigests: a client waits for one digest at a time, which no Drain waits for.
func TestDigests(t *testing.T) {
	m, s, u := openMember(t)
	m.digests <- "one"
	digest, next, err := u.Digest(t.Context(), []byte("-"))
	require.NoError(t, err)
	require.Equal(t, []string{"one", "-+"}, []string{string(digest), string(next)})

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	wait := func(ctx context.Context) {
		go func() {
			_, _, err := u.Digest(ctx, nil)
			ended <- err
		}()
		until(func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, c := range s.clients {
				return c.polls
			}
			return false
		})
	}
	wait(ctx)
	require.Zero(t, s.Report().Running, "it is none of the requests")
	_, _, err = u.Digest(t.Context(), nil)
	require.ErrorIs(t, err, engine.ErrBusy)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	m.digests <- "two" // the server waits no more for the one before
	digest, _, err = u.Digest(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, "two", string(digest))

	wait(t.Context())
	soon, free := context.WithTimeout(t.Context(), time.Minute)
	defer free()
	require.NoError(t, s.Drain(soon))
	require.Error(t, <-ended)
	_, _, err = u.Digest(t.Context(), nil)
	require.ErrorIs(t, err, engine.ErrClosed)

	_, path := openServer(t)
	alone, err := openUser(t.Context(), path)
	require.NoError(t, err)
	_, _, err = alone.Digest(t.Context(), nil)
	require.ErrorIs(t, err, engine.ErrNotSupported)
	require.NoError(t, alone.Client.Close(t.Context()))
}

// TestRemovedCopies: a copy that comes in behind the Remove of its block, or at that moment, does
// not bring it back; what a client stores does.
func TestRemovedCopies(t *testing.T) {
	_, s, u := openMember(t)
	keys := keysOf(1, 2)
	u.fill(keys)
	p := u.place(0, 2)
	p.Copy = true
	store := func() error {
		_, err := u.Store(t.Context(), keys, p)
		return err
	}
	require.NoError(t, store())
	require.NoError(t, u.Remove(t.Context(), keys[1:]))
	require.ErrorIs(t, store(), engine.ErrBusy)
	u.storeAndLoad(t, keys[1:])

	s.graves = graves{}
	require.NoError(t, u.Remove(t.Context(), keys))
	s.graves = graves{}
	standing := testpoint.Stand(t, "cache: landed")[0]
	ended, removed := make(chan error, 1), make(chan error, 1)
	go func() { ended <- store() }()
	<-standing.Came
	go func() { removed <- u.Remove(t.Context(), keys) }()
	until(func() bool {
		s.graves.mu.Lock()
		defer s.graves.mu.Unlock()
		return len(s.graves.removed[0]) > 0
	})
	require.Empty(t, removed, "it waits for the copy")
	standing.GoOn()
	require.NoError(t, <-removed)
	<-ended
	m, err := u.Match(t.Context(), keys)
	require.NoError(t, err)
	require.Equal(t, []cache.Found{cache.Nowhere, cache.Nowhere}, m.Blocks)
	until(func() bool { return s.Report().Running == 0 })

	s.graves.turned = time.Now().Add(-2 * gravesTime) // two minutes later
	require.NoError(t, store())
	for k := range uint64(2) {
		require.NoError(t, u.Remove(t.Context(), keysOf(1000+k*keysMax, keysMax)))
	}
	require.ErrorIs(t, store(), engine.ErrBusy, "too many were removed")
}
