// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"math"
	"math/bits"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// Directory is a description that was received. It keeps the regions encoded, and decodes a region
// when it is asked for: because of front coding, all regions decoded may take many times the bytes
// that the peer has sent.
type Directory struct {
	Description // without Regions

	body   []byte   // regions, encoded
	count  int      // of them
	marks  []mark   // one for every markEvery regions
	byName []uint64 // for each region, in order: hash of the name and, below it, index
	seed   maphash.Seed
}

// mark is a place in the encoded regions from which decoding can start: where a region begins, and
// the name of the region before, which front coding needs.
type mark struct {
	at       int
	previous string
}

// markEvery is how many regions are decoded at most to find one.
const markEvery = 32

// Read decodes a framed description, which must be all of b. The result aliases b.
func Read(b []byte) (*Directory, error) {
	body, err := open(b)
	if err != nil {
		return nil, err
	}
	r := &reader{rest: body, spare: repeatsMax * uint64(len(body))}
	d := &Directory{seed: maphash.MakeSeed()}
	copy(d.Engine[:], r.bytes(uint64(len(d.Engine))))
	copy(d.Host[:], r.bytes(uint64(len(d.Host))))
	d.Name = string(r.block(NameMax))
	d.NotifyMax = int(r.uvarint(NotifyMax))
	for range r.uvarint(BackendsMax) {
		d.Backends = append(d.Backends, Backend{string(r.block(NameMax)), r.block(driver.AddrMax)})
	}
	d.count = int(r.uvarint(RegionsMax))
	d.body = r.rest
	if r.err == nil {
		r.err = d.check()
	}
	previous := ""
	for i := 0; i < d.count && r.err == nil; i++ {
		if i%markEvery == 0 {
			d.marks = append(d.marks, mark{len(d.body) - len(r.rest), previous})
		}
		region := r.region(len(d.Backends), []byte(previous))
		if r.err == nil {
			r.err = d.checkRegion(&region)
		}
		previous = region.Name
		d.byName = append(d.byName, d.hash(previous)|uint64(i))
	}
	if r.err == nil && len(r.rest) != 0 {
		r.fail(fmt.Errorf("has %d bytes too many", len(r.rest)))
	}
	if r.err != nil {
		return nil, fmt.Errorf("description %w: %w", r.err, driver.ErrCorrupt)
	}
	slices.Sort(d.byName)
	d.byName = slices.Clip(d.byName)
	return d, nil
}

// hash returns a hash of a name; the low bits, those of an index, are 0. It is seeded, so that no
// peer can choose names with the same hash.
func (d *Directory) hash(name string) uint64 { return maphash.String(d.seed, name) &^ indexMask }

const indexMask = 1<<32 - 1

// Len returns the number of regions.
func (d *Directory) Len() int { return d.count }

// Region returns the region with a name. If several have the name, it returns the last one.
func (d *Directory) Region(name string) (region Region, known bool) {
	if d.count == 0 {
		return region, false
	}
	hash := d.hash(name)
	i, _ := slices.BinarySearch(d.byName, hash|indexMask)
	for i--; i >= 0 && d.byName[i]&^indexMask == hash; i-- {
		for region := range d.from(int(d.byName[i] & indexMask)) {
			if region.Name == name {
				return region, true
			}
			break
		}
	}
	return Region{}, false
}

// Only returns the region of a description that has exactly one, such as that of a lease.
func (d *Directory) Only() (region Region, is bool) {
	for region = range d.All() {
		break
	}
	return region, d.count == 1
}

// All returns the regions in the order of the encoding.
func (d *Directory) All() iter.Seq[Region] { return d.from(0) }

// from returns the regions from an index on. Read has checked their encoding.
func (d *Directory) from(first int) iter.Seq[Region] {
	return func(yield func(Region) bool) {
		if d.count == 0 {
			return
		}
		m := d.marks[first/markEvery]
		r := &reader{rest: d.body[m.at:], spare: math.MaxUint64}
		previous := m.previous
		for i := first / markEvery * markEvery; i < d.count; i++ {
			region := r.region(len(d.Backends), []byte(previous))
			if i >= first && !yield(region) {
				return
			}
			previous = region.Name
		}
	}
}

// Decode decodes a description with all its regions. It is for descriptions of few regions, such as
// a lease.
func Decode(b []byte) (*Description, error) {
	d, err := Read(b)
	if err != nil {
		return nil, err
	}
	all := d.Description
	for r := range d.All() {
		all.Regions = append(all.Regions, r)
	}
	return &all, nil
}

func (r *reader) region(backendCount int, previous []byte) Region {
	out := Region{Name: string(r.front(previous, NameMax))}
	ranged := false
	if flags := r.bytes(1); r.err == nil {
		out.Kind = driver.Kind(flags[0] &^ (readOnlyFlag | rangesFlag))
		out.ReadOnly = flags[0]&readOnlyFlag != 0
		ranged = flags[0]&rangesFlag != 0
	}
	if out.Kind > driver.File {
		r.fail(errors.New("has a region of an unknown kind"))
	}
	out.Size = r.uvarint(math.MaxInt64)
	out.Set = uint32(r.uvarint(1<<backendCount - 1))
	out.Tokens = make([][]byte, bits.OnesCount32(out.Set))
	var last []byte
	for i := range out.Tokens {
		if i == 0 {
			last = r.block(driver.TokenMax)
		} else {
			last = r.front(last, driver.TokenMax)
		}
		if len(last) == 0 {
			r.fail(errors.New("has an empty token"))
		}
		out.Tokens[i] = last
	}
	if ranged {
		out.Only = r.ranges()
	}
	return out
}
