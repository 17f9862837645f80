// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"cmp"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of
// their lists. All is guarded by books.Mu.
type job struct {
	ownfiles.Job[extent]

	paged  bool
	pages  driver.Pages
	sorted bool     // by order: the entries of the pattern do not rise in the file
	order  []uint64 // file index and entry
	items  []item   // of descriptors, rising in the file within each view
	count  int

	at      cursor // what the next request begins with
	high    uint64 // end of what was begun in the file of the view
	flying  int    // requests
	syncs   int    // files whose sync it waits for
	durable bool   // it ends once the disk has what it wrote
	synced  bool   // it has asked for those
	queued  bool   // in Backend.queue
}

// cursor is a place in the pieces of a job.
type cursor struct {
	piece int
	off   uint64 // within the piece
}

// item is a descriptor.
type item struct {
	local, remote, n uint64
	view, index      uint32
}

// piece returns one, in the order in which they are done.
func (j *job) piece(i int) item {
	if !j.paged {
		return j.items[i]
	}
	if j.sorted {
		i = int(uint32(j.order[i]))
	}
	return item{local: j.pages.LocalAt(i), remote: j.pages.RemoteAt(i), n: j.pages.EntryLen, index: uint32(i)}
}

// setDescs takes a list, whose memory is the caller's, in the order of the file.
func (j *job) setDescs(descs []driver.Desc) {
	j.paged, j.items = false, j.items[:0]
	rising, at := true, 0
	for i := range descs {
		d := &descs[i]
		for !j.Views[at].Shows(d) {
			at++
		}
		j.items = append(j.items, item{d.Local, d.Remote, d.Len, uint32(at), uint32(i)})
		rising = rising && (i == 0 || less(&j.items[i-1], &j.items[i]) < 0)
	}
	if !rising {
		slices.SortFunc(j.items, func(a, b item) int { return less(&a, &b) })
	}
	j.count = len(descs)
}

func less(a, b *item) int {
	if a.view != b.view {
		return cmp.Compare(a.view, b.view)
	}
	if a.remote != b.remote {
		return cmp.Compare(a.remote, b.remote)
	}
	return cmp.Compare(a.index, b.index)
}

// setPages takes a pattern. Its lists stay as they are until the job ends.
func (j *job) setPages(p *driver.Pages) {
	j.paged, j.pages, j.count = true, *p, p.Count
	j.sorted = p.Remote != nil && !slices.IsSorted(p.Remote)
	if !j.sorted {
		return
	}
	j.order = j.order[:0]
	for i, index := range p.Remote {
		j.order = append(j.order, uint64(index)<<32|uint64(i))
	}
	slices.Sort(j.order)
}

// clear forgets what the job pointed to, and lists of a length that is seldom.
func (j *job) clear() {
	j.Clear()
	j.pages = driver.Pages{}
	if cap(j.order) > keptMax {
		j.order = nil
	}
}

const keptMax = 16 << 10 // entries: 128 KiB a job
