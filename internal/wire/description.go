// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// Limits of a description.
const (
	NameMax     = 255     // bytes of an engine's, a backend's or a region's name
	BackendsMax = 32      // as many as Region.Set has bits
	RegionsMax  = 1 << 20 // 1 Mi
	NotifyMax   = 1 << 30 // highest value of Description.NotifyMax
)

// ID names an engine or a host.
type ID [16]byte

// Description is what one engine tells another about itself: how to connect to it, and which memory
// it offers. A lease is a Description too: its Backends have no addresses, and it has one region.
type Description struct {
	Engine   ID
	Host     ID // engines with the same Host may share memory
	Name     string
	Backends []Backend
	Regions  []Region

	NotifyMax int // bytes of a notification that the engine takes
}

// Addr returns the address of the backend of that name, nil when there is none.
func (d *Description) Addr(name string) []byte {
	for _, b := range d.Backends {
		if b.Name == name {
			return b.Addr
		}
	}
	return nil
}

// Backend is the name of a backend and how to connect to it.
type Backend struct {
	Name string
	Addr []byte
}

// Region is a named memory with a token for each backend that serves it.
type Region struct {
	Name     string
	Kind     driver.Kind
	ReadOnly bool
	Size     uint64
	Only     driver.Ranges // the ranges that peers may access; nil: all of it

	Set    uint32   // bit i is set if Description.Backends[i] has a token for the region
	Tokens [][]byte // the tokens of those backends, in the order of the bits
}

// Pack sets Set and Tokens. list has the token of each of Description.Backends, or nil for a
// backend that has none. The Region keeps list, and changes it.
func (r *Region) Pack(list [][]byte) {
	r.Set, r.Tokens = 0, list[:0]
	for i, token := range list {
		if token != nil {
			r.Set |= 1 << i
			r.Tokens = append(r.Tokens, token)
		}
	}
}

// Token returns the token of Description.Backends[backend], or nil if that has none.
func (r *Region) Token(backend int) []byte {
	if backend >= BackendsMax || r.Set&(1<<backend) == 0 {
		return nil
	}
	return r.Tokens[bits.OnesCount32(r.Set&(1<<backend-1))]
}

// The flags of a region. They share a byte with its Kind.
const (
	readOnlyFlag = 1 << 7
	rangesFlag   = 1 << 6 // Only follows the tokens
)

// Encode appends the description to dst, in a frame (wire.go). It uses front coding: a name is
// written as the number of bytes that it has in common with the name of the region before, and the
// rest; a token likewise, after the token before of the same region. That halves a description,
// because the tokens of a region begin with the same secret.
func Encode(dst []byte, d *Description) ([]byte, error) {
	if err := d.check(); err != nil {
		return dst, err
	}
	start := len(dst)
	b := append(slices.Grow(dst, d.estimateSize()), magic...)
	b = append(b, Version)
	b = append(b, d.Engine[:]...)
	b = append(b, d.Host[:]...)
	b = appendBlock(b, d.Name)
	b = binary.AppendUvarint(b, uint64(d.NotifyMax))
	b = binary.AppendUvarint(b, uint64(len(d.Backends)))
	for _, be := range d.Backends {
		b = appendBlock(b, be.Name)
		b = appendBlock(b, be.Addr)
	}
	b = binary.AppendUvarint(b, uint64(len(d.Regions)))
	previous := ""
	for i := range d.Regions {
		b = appendRegion(b, previous, &d.Regions[i])
		previous = d.Regions[i].Name
	}
	return seal(b, start), nil
}

// estimateSize returns about how many bytes the encoding has, so that Encode mostly allocates once.
func (d *Description) estimateSize() int {
	n := 128 + len(d.Name)
	for i := range d.Backends {
		n += 16 + len(d.Backends[i].Name) + len(d.Backends[i].Addr)
	}
	for i := range d.Regions {
		r := &d.Regions[i]
		n += 8 + len(r.Name)
		for _, token := range r.Tokens {
			n += 2 + len(token)
		}
	}
	return n
}

func appendRegion(b []byte, previous string, r *Region) []byte {
	b = appendFrontCoded(b, previous, r.Name)
	flags := byte(r.Kind)
	if r.ReadOnly {
		flags |= readOnlyFlag
	}
	if r.Only != nil {
		flags |= rangesFlag
	}
	b = append(b, flags)
	b = binary.AppendUvarint(b, r.Size)
	b = binary.AppendUvarint(b, uint64(r.Set))
	for i, token := range r.Tokens {
		if i == 0 {
			b = appendBlock(b, token)
		} else {
			b = appendFrontCoded(b, r.Tokens[i-1], token)
		}
	}
	if r.Only != nil {
		b = appendRanges(b, r.Only)
	}
	return b
}

func (d *Description) check() error {
	if d.NotifyMax < 0 || d.NotifyMax > NotifyMax {
		return fmt.Errorf("describe: notifications of %d bytes: %w", d.NotifyMax, driver.ErrBounds)
	}
	if err := CheckName(d.Name); err != nil {
		return fmt.Errorf("describe: %w", err)
	}
	if len(d.Backends) > BackendsMax || len(d.Regions) > RegionsMax {
		return fmt.Errorf("describe: %d backends (at most %d), %d regions (%d): %w",
			len(d.Backends), BackendsMax, len(d.Regions), RegionsMax,
			driver.ErrBounds)
	}
	for _, b := range d.Backends {
		if b.Name == "" || CheckName(b.Name) != nil || len(b.Addr) > driver.AddrMax {
			return fmt.Errorf("describe backend %q with an address of %d bytes: %w", b.Name,
				len(b.Addr), driver.ErrBounds)
		}
	}
	for i := range d.Regions {
		if err := d.checkRegion(&d.Regions[i]); err != nil {
			return err
		}
	}
	return nil
}

func (d *Description) checkRegion(r *Region) error {
	if err := CheckName(r.Name); err != nil {
		return fmt.Errorf("describe region: %w", err)
	}
	if r.Size == 0 || bits.Len32(r.Set) > len(d.Backends) ||
		bits.OnesCount32(r.Set) != len(r.Tokens) {
		return fmt.Errorf("describe region %q of %d bytes with %d tokens: %w", r.Name, r.Size,
			len(r.Tokens), driver.ErrBounds)
	}
	if err := r.Only.Check(r.Size); err != nil {
		return fmt.Errorf("describe region %q: %w", r.Name, err)
	}
	for _, token := range r.Tokens {
		if len(token) == 0 || len(token) > driver.TokenMax {
			return fmt.Errorf("describe region %q with a token of %d bytes: %w", r.Name,
				len(token), driver.ErrBounds)
		}
	}
	return nil
}

// Equal reports whether two descriptions have the same encoding.
func (d *Description) Equal(o *Description) bool {
	a, errA := Encode(nil, d)
	b, errB := Encode(nil, o)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}
