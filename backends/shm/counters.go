// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/sealed"
)

// counters are seen by their owner or by a peer, which adds to them itself once the bytes
// are placed: that is one addition, whatever the owner does.
type counters struct{ mem []byte }

func newCounters() (fd int, c counters, err error) {
	fd, mem, err := sealed.New("sluice-counters", countersBytes, false)
	return fd, counters{mem}, err
}

func openCounters(fd int) (counters, error) {
	mem, err := sealed.Map(fd, countersBytes, unix.PROT_READ|unix.PROT_WRITE)
	return counters{mem}, err
}

func (c counters) due() *atomic.Uint64 { return word(c.mem, countersDueAt) }

func (c counters) value(n uint32) *atomic.Uint64 {
	return word(c.mem, pageBytes+uint64(n)*counterBytes)
}

func (c counters) awaited(n uint32) *atomic.Uint64 {
	return word(c.mem, pageBytes+uint64(n)*counterBytes+8)
}

// arrive adds one, and reports whether the owner waits for that. The sender adds before it looks at
// what the owner awaits, and the owner writes that before it looks at the value: one of the two
// sees the other.
func (c counters) arrive(n uint32) (wake bool) {
	value := c.value(n).Add(1)
	awaited := c.awaited(n).Load()
	if awaited == 0 || value < awaited {
		return false
	}
	c.due().Swap(1)
	return true
}

// Count implements driver.Backend.
func (b *Backend) Count(counter uint32) uint64 {
	if counter >= driver.CountersMax || !b.counting.Enter() {
		return 0
	}
	defer b.counting.Exit()
	return b.counters.value(counter).Load()
}

// AwaitCount implements driver.Backend.
func (b *Backend) AwaitCount(counter uint32, n uint64) (reached bool) {
	if counter >= driver.CountersMax || !b.counting.Enter() {
		return false
	}
	defer b.counting.Exit()
	b.counters.awaited(counter).Swap(n)
	return b.counters.value(counter).Load() >= n
}

// reached reports, once, that an awaited count has been reached.
func (b *Backend) reached() bool {
	due := b.counters.due()
	return due.Load() != 0 && due.Swap(0) != 0
}
