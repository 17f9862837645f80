// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

func (n *node) hint(t *testing.T, keys []Key, kind HintKind, d time.Duration) {
	t.Helper()
	r, err := n.ns.Hint(keys, Hint{kind, d})
	require.NoError(t, err)
	require.Equal(t, HintResult{Applied: len(keys)}, r)
}

// TestSessionEnd: blocks of a session that has ended go before all others, in both tiers, and
// before those of a lower priority; one that is used again is as the others.
func TestSessionEnd(t *testing.T) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		t.Run(string(p), func(t *testing.T) {
			n := openNode(t, memoryFile(t), 32, func(c *Config) {
				withDisk(filepath.Join(t.TempDir(), "disk"), 32)(c)
				c.Policy = p
			})
			high, err := n.Namespace("high", NamespaceOptions{Priority: 3})
			require.NoError(t, err)
			op := high.Store(t.Context(), ids(0, 8), n.at(0, 8))
			require.NoError(t, op.Wait(t.Context()))
			n.put(t, ids(0, 24))
			require.NoError(t, n.Drain(t.Context()))
			r, err := high.Hint(ids(0, 8), Hint{Kind: HintSessionEnd})
			require.NoError(t, err)
			require.Equal(t, HintResult{Applied: 8}, r)
			op = high.Load(t.Context(), ids(0, 1), n.at(0, 1))
			require.NoError(t, op.Wait(t.Context()))
			n.put(t, ids(100, 7))
			require.NoError(t, n.Drain(t.Context()))
			require.Equal(t, 24, n.ns.Match(ids(0, 24)).Prefix)
			require.Equal(t, append([]Found{InMemory | OnDisk}, make([]Found, 7)...),
				high.Match(ids(0, 8)).Blocks)
			n.drained(t)
		})
	}
}

// TestRetain: a retained block stays in the cache, wherever, until its time is over, or a release;
// Remove is stronger, and no TTL is.
func TestRetain(t *testing.T) {
	for _, disk := range []bool{false, true} {
		t.Run(fmt.Sprintf("disk=%v", disk), func(t *testing.T) {
			h := newHandClock()
			n := openNode(t, memoryFile(t), 32, h.with(func(c *Config) {
				if disk {
					withDisk(filepath.Join(t.TempDir(), "disk"), 32)(c)
				}
				c.Policy = LRU
			}))
			require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 16 * blockBytes,
				TTL: 5 * time.Second}))
			n.put(t, ids(0, 8))
			for _, d := range []time.Duration{0, time.Hour + 1} { // who retains them may be gone
				_, err := n.ns.Hint(ids(0, 6), Hint{HintRetain, d})
				require.ErrorIs(t, err, engine.ErrBounds)
			}
			n.hint(t, ids(0, 6), HintRetain, 10*time.Second)
			n.hint(t, ids(0, 6), HintSessionEnd, 0)
			n.flood(t, 1000)
			h.pass(n, 9)
			n.flood(t, 2000)
			require.Equal(t, 6, n.ns.Match(ids(0, 8)).Prefix)
			n.ns.Remove(ids(0, 1))
			require.Equal(t, Nowhere, n.ns.Match(ids(0, 1)).Blocks[0])
			n.hint(t, ids(1, 1), HintRelease, 0)
			require.Equal(t, Nowhere, n.ns.Match(ids(1, 1)).Blocks[0], "its TTL")
			n.hint(t, ids(2, 1), HintRetain, 100*time.Second)
			require.EqualValues(t, 4*blockBytes, n.Stats().Held)
			n.now.Store(h.now.Add(2)) // before the keeper has come to them
			n.flood(t, 5000)
			require.EqualValues(t, 4*blockBytes, n.Stats().Held)
			h.pass(n, 0)
			require.EqualValues(t, blockBytes, n.Stats().Held)
			require.Equal(t, all(Done, 1), n.get(t, ids(2, 1)))
			n.flood(t, 3000)
			require.Equal(t, []bool{true, false}, []bool{n.ns.Match(ids(2, 1)).Prefix == 1,
				n.ns.Match(ids(3, 1)).Prefix == 1})
			n.drained(t)
		})
	}
}

// TestDemote: a block leaves memory once a disk has it, unless it is used meanwhile.
func TestDemote(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, nil)
	n.put(t, ids(0, 1))
	_, err := n.ns.Hint(ids(0, 1), Hint{Kind: HintDemote})
	require.ErrorIs(t, err, errNoDisk)

	h := newHandClock()
	n = openNode(t, memoryFile(t), 32, h.with(withDisk(filepath.Join(t.TempDir(), "disk"), 64)))
	n.put(t, ids(0, 4))
	n.hint(t, ids(0, 3), HintDemote, 0)
	require.Equal(t, []Found{OnDisk, OnDisk, OnDisk, InMemory | OnDisk},
		n.ns.Match(ids(0, 4)).Blocks)
	n.hint(t, ids(0, 3), HintDemote, 0)
	require.NoError(t, n.ns.Set(NamespaceOptions{Flow: WriteBack}))
	n.put(t, ids(10, 2))
	p, err := n.ns.Pin(t.Context(), ids(10, 1), 0)
	require.NoError(t, err)
	n.hint(t, ids(10, 2), HintDemote, 0)
	require.NoError(t, n.Drain(t.Context()))
	require.Equal(t, []Found{InMemory | OnDisk, OnDisk}, n.ns.Match(ids(10, 2)).Blocks)
	p.Close()
	require.Equal(t, []Found{OnDisk, OnDisk}, n.ns.Match(ids(10, 2)).Blocks)
	require.Equal(t, all(Done, 3), n.get(t, ids(0, 3)))

	// a use takes it back
	p, err = n.ns.Pin(t.Context(), ids(0, 2), 0)
	require.NoError(t, err)
	n.hint(t, ids(0, 2), HintDemote, 0)
	require.Equal(t, all(InMemory|OnDisk, 2), n.ns.Match(ids(0, 2)).Blocks)
	n.get(t, ids(0, 1))
	p.Close()
	require.Equal(t, []Found{InMemory | OnDisk, OnDisk}, n.ns.Match(ids(0, 2)).Blocks)

	// no disk takes it
	n.put(t, ids(20, 1))
	n.disks[0].mu.Lock()
	n.disks[0].health.without = time.Now().Add(time.Hour)
	n.disks[0].mu.Unlock()
	n.hint(t, ids(20, 1), HintDemote, 0)
	require.NoError(t, n.Drain(t.Context()))
	require.Equal(t, InMemory, n.ns.Match(ids(20, 1)).Blocks[0])
	n.drained(t)
}

// TestDurableBesideDemote: a Store waits for the write of its blocks whoever has offered them.
func TestDurableBesideDemote(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	require.Equal(t, 2, n.batchOf(blockBytes))
	var batches atomic.Int32
	landed, goOn, write := make(chan struct{}), make(chan struct{}), make(chan struct{})
	testpoint.Set(func(p string) {
		switch {
		case p == "cache: landed" && batches.Add(1) == 2:
			close(landed)
			<-goOn
		case p == "cache: on disk":
			<-write
		}
	})
	defer testpoint.Set(nil)
	op := n.ns.Store(t.Context(), ids(0, 4), n.at(0, 4))
	<-landed
	n.hint(t, ids(0, 2), HintDemote, 0)
	n.ns.Remove(ids(2, 2)) // the Store offers none
	close(goOn)
	require.NoError(t, op.Wait(t.Context()))
	known := n.ns.Store(t.Context(), ids(0, 2), n.at(0, 2))
	require.NoError(t, known.Wait(t.Context()))
	require.Equal(t, all(Known, 2), known.Outcomes())
	for _, op := range []*Op{op, known} {
		select {
		case <-op.Durable():
			t.Error("no disk has its blocks yet")
		default:
		}
	}
	close(write)
	<-op.Durable()
	<-known.Durable()
	n.drained(t)
}

// TestDemoteBesideClose: a hint that comes while the cache closes and waits for a disk is refused.
func TestDemoteBesideClose(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	require.NoError(t, n.ns.Set(NamespaceOptions{Flow: WriteBack}))
	n.put(t, ids(0, 2))
	standing := testpoint.Stand(t, "cache: on disk")[0]
	n.hint(t, ids(0, 1), HintDemote, 0)
	<-standing.Came
	closed := make(chan error, 1)
	go func() { closed <- n.Cache.Close() }()
	until(func() bool { // the writer's channel is closed
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.closed && n.life.Err() != nil
	})
	for range 100 {
		runtime.Gosched()
		r, err := n.ns.Hint(ids(1, 1), Hint{Kind: HintDemote})
		require.ErrorIs(t, err, engine.ErrClosed)
		require.Equal(t, HintResult{Refused: 1}, r)
	}
	standing.GoOn()
	require.NoError(t, <-closed)
}

// TestPrefetch: it brings blocks from a disk, up to a quarter of the memory; those that nobody uses
// go before all others.
func TestPrefetch(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 512)(c)
		c.Policy = LRU
	})
	n.put(t, ids(0, 16))
	n.flood(t, 1000)
	require.Equal(t, all(OnDisk, 16), n.ns.Match(ids(0, 16)).Blocks)
	op := n.ns.Prefetch(t.Context(), ids(0, 16))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, append(all(Done, 8), all(NoRoom, 8)...), op.Outcomes())
	require.Equal(t, all(InMemory|OnDisk, 8), n.ns.Match(ids(0, 8)).Blocks)
	require.Equal(t, all(Done, 2), n.get(t, ids(0, 2)))
	n.put(t, ids(5000, 6))
	require.Equal(t, append(all(InMemory|OnDisk, 2), all(OnDisk, 6)...),
		n.ns.Match(ids(0, 8)).Blocks)
	op = n.ns.Prefetch(t.Context(), ids(7000, 2))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Missing, 2), op.Outcomes())

	// what is in memory is none of the quarter
	n.get(t, ids(0, 2))
	op = n.ns.Prefetch(t.Context(), ids(0, 16))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, append(all(Done, 10), all(NoRoom, 6)...), op.Outcomes())

	n.put(t, ids(6000, 30))
	c := n.prefetching
	c <- struct{}{}
	for range n.cfg.OpsMax / 16 {
		n.hint(t, ids(4, 1), HintPrefetch, 0)
	}
	_, err := n.ns.Hint(ids(4, 1), Hint{Kind: HintPrefetch})
	require.ErrorIs(t, err, engine.ErrBusy)
	for range n.cfg.OpsMax/4 - n.cfg.OpsMax/16 { // hints take no room from who calls it
		n.ns.Prefetch(t.Context(), ids(4, 1))
	}
	op = n.ns.Prefetch(t.Context(), ids(4, 1))
	require.ErrorIs(t, op.Wait(t.Context()), engine.ErrBusy)
	require.Equal(t, all(Done, 1), n.get(t, ids(6029, 1)), "nor do they from others")
	<-c
	until(func() bool { return n.prefetches.Load() == 0 })
	n.hint(t, ids(2, 2), HintPrefetch, 0)
	until(func() bool { return n.ns.Match(ids(3, 1)).Blocks[0] == InMemory|OnDisk })
	n.drained(t)
}

// TestLoadBehindAPrefetch: a Load that waits for a block which another operation reads, and could
// not bring as it has less room, reads it itself.
func TestLoadBehindAPrefetch(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	key := ids(0, 1)
	n.put(t, key)
	n.hint(t, key, HintDemote, 0)
	change := func(f func(e *entry)) {
		n.index.each(n.ns.id, key, false, func(_ *shard, _ int, i uint32, _ uint64) {
			f(n.index.entry(i))
		})
	}
	change(func(e *entry) { e.flags |= reading })
	op := n.ns.Load(t.Context(), key, n.at(128, 1))
	until(func() (waits bool) {
		change(func(e *entry) { waits = e.pins > 0 })
		return waits
	})
	for range 1000 {
		runtime.Gosched()
	}
	change(func(e *entry) { e.flags &^= reading })
	n.arrived()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 1), op.Outcomes())
	n.drained(t)
}

// TestHintEnvelope: each action has an outcome of its own.
func TestHintEnvelope(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 2 * blockBytes}))
	eight := binary.BigEndian.AppendUint64(nil, 1<<63+5)
	keys := append(ids(0, 3), KeyOf(eight))
	n.put(t, keys)
	hash := func(k int) string { return `"` + hex.EncodeToString(keys[k][:]) + `"` }
	body := `{"protocol_version":"0.1","message_id":"m","actions":[` +
		`{"action_id":"a","action_type":"kv.retain","action_version":"1.0","payload":{` +
		`"block_hashes":[` + hash(0) + `,9223372036854775813],"ttl_seconds":2.5,"scope":"x"}},` +
		`{"action_id":"b","action_type":"kv.retain","action_version":"1.0","payload":{` +
		`"block_hashes":[` + hash(1) + `],"ttl_seconds":1}},` +
		`{"action_id":"c","action_type":"kv.evolve","action_version":"1.0","payload":{}},` +
		`{"action_id":"d","action_type":"kv.fetch","action_version":"2.0","payload":{}},` +
		`{"action_id":"e","action_type":"kv.fetch","action_version":"1.0","payload":{` +
		`"source_control_endpoint":"h:1","block_hashes":["0x` + hash(2)[1:] + `,"77"]}},` +
		`{"action_id":"f","action_type":"kv.demote","action_version":"1.0","payload":{` +
		`"block_hashes":["soon"]}},` +
		`{"action_id":"g","action_type":"kv.retain","action_version":"1.0","payload":{` +
		`"block_hashes":["1"],"ttl_seconds":-1}},` +
		`{"action_id":"h","action_type":"kv.release","action_version":"1.0","payload":null},` +
		`{"action_id":"i","action_type":"kv.session_end","action_version":"1.0","payload":{` +
		`"block_hashes":["-9223372036854775803"]}}]}`
	for range 2 { // the second time changes nothing
		list, err := n.ns.HintEnvelope([]byte(body))
		require.NoError(t, err)
		want := []ActionOutcome{
			{"a", ActionApplied, "", HintResult{Applied: 2}},
			{"b", ActionRejected, "that the namespace holds", HintResult{Refused: 1}},
			{"c", ActionUnsupported, `no action "kv.evolve"`, HintResult{}},
			{"d", ActionUnsupported, "known is 1.0", HintResult{}},
			{"e", ActionApplied, "", HintResult{Applied: 1, Missing: 1}},
			{"f", ActionRejected, "block hash", HintResult{}},
			{"g", ActionRejected, "ttl_seconds -1", HintResult{}},
			{"h", ActionRejected, "no block_hashes", HintResult{}},
			{"i", ActionApplied, "", HintResult{Applied: 1}},
		}
		for k := range want {
			require.Contains(t, list[k].Reason, want[k].Reason)
			list[k].Reason = want[k].Reason
		}
		require.Equal(t, want, list)
	}
	for _, data := range []string{"", "[]", `{"actions":[]`, `{"actions":7}`} {
		_, err := n.ns.HintEnvelope([]byte(data))
		require.ErrorIs(t, err, engine.ErrCorrupt, "%q", data)
		require.NotContains(t, err.Error(), "Go ", "%q", data)
	}
	_, err := n.ns.HintEnvelope(make([]byte, envelopeMax+1))
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = n.ns.HintEnvelope([]byte(`{"actions":[{}` + strings.Repeat(",{}", valuesMax+1) + `]}`))
	require.ErrorContains(t, err, "values", "before it is parsed")
	n.drained(t)
}

// FuzzHintEnvelope: no bytes make it fail, or take long.
func FuzzHintEnvelope(f *testing.F) {
	n := openNode(f, memoryFile(f), 16, nil)
	f.Add([]byte(`{"actions":[{"action_type":"kv.retain","action_version":"1.0","payload":{` +
		`"block_hashes":[1],"ttl_seconds":1}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := n.ns.HintEnvelope(data)
		if err != nil && list != nil {
			t.Fatal(list, err)
		}
	})
}
