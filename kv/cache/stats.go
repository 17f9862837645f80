// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"
)

// counters are what Stats tells of all operations.
type counters struct {
	loads, stores            [outcomesMax]atomic.Uint64
	loadedBytes, storedBytes atomic.Uint64
	evicted                  [tiers]atomic.Uint64
	swappedIn, swappedOut    atomic.Uint64
	unwritten, expired       atomic.Uint64
	refusedHints             atomic.Uint64
	unproven                 atomic.Int64
}

// Stats are the counts of a cache. Those of operations and of blocks that moved only grow. Programs
// read the names in JSON.
type Stats struct {
	Tiers PerTier[TierStats] `json:"tiers"`
	// those without a name by "digest " and its bytes in hex
	Namespaces map[string]NamespaceStats `json:"namespaces"`
	Disks      []DiskStats               `json:"disks"`
	Object     *BelowStats               `json:"object,omitempty"` // of Config.Below

	// blocks: hits are Done, the others say why not
	Loads  map[Outcome]uint64 `json:"loads"`
	Stores map[Outcome]uint64 `json:"stores"`

	LoadedBytes uint64 `json:"loaded_bytes"`
	StoredBytes uint64 `json:"stored_bytes"`
	SwappedIn   uint64 `json:"swapped_in"`  // blocks from disks
	SwappedOut  uint64 `json:"swapped_out"` // blocks to disks
	// blocks that no disk was given: too many waited, no disk had room, or bytes of its day left
	Unwritten    uint64 `json:"unwritten"`
	Unproven     int    `json:"unproven"`      // transfers without a proof of their end, now
	Expired      uint64 `json:"expired"`       // blocks that went by their TTL
	Held         uint64 `json:"held"`          // bytes that Pins and Retain hints keep, now
	RefusedHints uint64 `json:"refused_hints"` // blocks of Retain hints beyond a budget
}

// PerTier has a value for each Tier; JSON has them by the names of the tiers.
type PerTier[T any] [2]T

// MarshalJSON implements json.Marshaler.
func (p PerTier[T]) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]T{Memory.String(): p[Memory], Disk.String(): p[Disk]})
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *PerTier[T]) UnmarshalJSON(text []byte) error {
	var values map[string]T
	err := json.Unmarshal(text, &values)
	p[Memory], p[Disk] = values[Memory.String()], values[Disk.String()]
	return err
}

// TierStats are the counts of one tier.
type TierStats struct {
	Blocks  int    `json:"blocks"`
	Bytes   uint64 `json:"bytes"`   // of their slots
	Room    uint64 `json:"room"`    // bytes
	Evicted uint64 `json:"evicted"` // blocks that had to go
}

// NamespaceStats are the counts of one namespace, by tier.
type NamespaceStats struct {
	Blocks PerTier[int64] `json:"blocks"`
	Bytes  PerTier[int64] `json:"bytes"`
}

// DiskStats are the counts of one disk.
type DiskStats struct {
	Path   string `json:"path"`
	Blocks int    `json:"blocks"`
	Bytes  uint64 `json:"bytes"`
	Room   uint64 `json:"room"`
	Day    uint64 `json:"bytes_a_day"`      // BytesADay of its DiskConfig; 0: no bound
	Left   uint64 `json:"left"`             // bytes that may be written at once, with a Day
	Fresh  string `json:"fresh,omitempty"`  // why the file that was there was not used
	Error  string `json:"error,omitempty"`  // of the last write or read that failed
	Unused string `json:"unused,omitempty"` // why it is left alone now; "": it is not
	Silent bool   `json:"silent,omitempty"` // it has not answered for SlowAfter
	// Leaving is how many blocks are gone whose records a restart may find still.
	Leaving int `json:"leaving,omitempty"`
}

// Stats returns the counts as they are.
func (c *Cache) Stats() Stats {
	s := Stats{Namespaces: map[string]NamespaceStats{}, Disks: []DiskStats{},
		Loads: map[Outcome]uint64{}, Stores: map[Outcome]uint64{},
		LoadedBytes: c.stats.loadedBytes.Load(),
		StoredBytes: c.stats.storedBytes.Load(), SwappedIn: c.stats.swappedIn.Load(),
		SwappedOut: c.stats.swappedOut.Load(), Unwritten: c.stats.unwritten.Load(),
		Unproven: int(c.stats.unproven.Load()), Expired: c.stats.expired.Load(),
		Held: uint64(c.heldBytes.Load()), RefusedHints: c.stats.refusedHints.Load()}
	for o := range outcomesMax {
		if n := c.stats.loads[o].Load(); n > 0 {
			s.Loads[o] = n
		}
		if n := c.stats.stores[o].Load(); n > 0 {
			s.Stores[o] = n
		}
	}
	if !c.enter() {
		return s
	}
	defer c.exit()
	s.Tiers[Memory] = c.places.stats()
	for _, d := range c.disks {
		t := d.places.stats()
		s.Tiers[Disk].Blocks += t.Blocks
		s.Tiers[Disk].Bytes += t.Bytes
		s.Tiers[Disk].Room += t.Room
		s.Disks = append(s.Disks, d.stats(t))
	}
	if c.cfg.Below != nil {
		b := c.cfg.Below.Stats()
		s.Object = &b
	}
	for t := range tiers {
		s.Tiers[t].Evicted = c.stats.evicted[t].Load()
	}
	for _, i := range c.Spaces() {
		name := cmp.Or(i.Name, fmt.Sprintf("digest %x", i.Digest))
		n := s.Namespaces[name] // of several geometries: their sum
		for t := range tiers {
			n.Blocks[t] += i.Blocks[t]
			n.Bytes[t] += i.Bytes[t]
		}
		s.Namespaces[name] = n
	}
	return s
}

func (s *slots) stats() TierStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return TierStats{Blocks: s.used, Bytes: s.inUse * granule,
		Room: uint64(len(s.extents)) * uint64(s.each) * granule}
}

func (d *disk) stats(t TierStats) DiskStats {
	s := DiskStats{Path: d.cfg.Path, Blocks: t.Blocks, Bytes: t.Bytes, Room: t.Room, Fresh: d.fresh}
	if err := d.unused(); err != nil {
		s.Unused = err.Error()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.Silent = d.silent(time.Now()) > 0
	if d.budget.day > 0 {
		d.budget.refill(time.Now())
		s.Day, s.Left = d.cfg.BytesADay, uint64(d.budget.left)
	}
	s.Leaving = len(d.emptying)
	if d.health.last != nil {
		s.Error = d.health.last.Error()
	}
	return s
}
