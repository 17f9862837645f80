// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/wire"
)

// regionSpec is what a --region says: memory of a size, or a part of a file.
type regionSpec struct {
	name   string
	size   uint64 // of memory, unless path is set
	path   string
	off, n uint64 // of the file; n 0: to its end
	write  bool   // peers may write to the file

	writers []string // names in the certificates of peers that alone may write; nil: see write
}

// parseRegion reads NAME=SIZE and NAME=PATH[:OFFSET:LENGTH], with [:rw[=PEER,PEER]] behind either.
// A text that is no size is a path; so is ./64.
func parseRegion(text string) (regionSpec, error) {
	name, what, found := strings.Cut(text, "=")
	if !found || name == "" || what == "" || wire.CheckName(name) != nil {
		return regionSpec{}, usagef("--region %q: want NAME=SIZE, or NAME=FILE, or "+
			"NAME=FILE:OFFSET:LENGTH, with :rw behind a file that peers may write, or "+
			":rw=PEER,PEER for some of them alone", text)
	}
	s := regionSpec{name: name}
	if head, peers, found := cutRights(what); found {
		what, s.write, s.writers = head, true, peers
		if slices.Contains(peers, "") {
			return s, usagef("--region %q: want the names of peers behind :rw=, with commas", text)
		}
	}
	if n, err := bench.ParseSize(what); err == nil {
		s.size = n
		return s, nil
	}
	s.path = what
	head, length, two := cutLast(what)
	path, offset, three := cutLast(head)
	if !two || !three {
		return s, nil
	}
	off, err := parseOffset(offset)
	n, err2 := bench.ParseSize(length)
	if err != nil || err2 != nil {
		return s, nil // colons of its name
	}
	s.path, s.off, s.n = path, off, n
	return s, nil
}

// cutRights takes :rw or :rw=PEER,PEER off the end.
func cutRights(s string) (head string, peers []string, found bool) {
	if head, found = strings.CutSuffix(s, ":rw"); found {
		return head, nil, true
	}
	i := strings.LastIndex(s, ":rw=")
	if i < 0 {
		return s, nil, false
	}
	return s[:i], strings.Split(s[i+len(":rw="):], ","), true
}

func cutLast(s string) (head, tail string, found bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// parseOffset is bench.ParseSize that takes 0 as well.
func parseOffset(text string) (uint64, error) {
	if text == "0" {
		return 0, nil
	}
	if strings.HasPrefix(text, "-") {
		return 0, fmt.Errorf("%s is negative: want 0 or more", text)
	}
	return bench.ParseSize(text)
}

// served is a region while it is served.
type served struct {
	spec     regionSpec
	region   *engine.Region
	writable *engine.Region // the same, for writers; nil: there are none
	memory   *engine.Memory
	file     *os.File
}

// to is the region as one peer learns of it.
func (r *served) to(peer string) *engine.Region {
	if slices.Contains(r.spec.writers, peer) {
		return r.writable
	}
	return r.region
}

// tell is engine.Config.Tell. All regions are there before Serve.
func tell(regions []*served, peer string) map[string]*engine.Region {
	told := map[string]*engine.Region{}
	for _, r := range regions {
		told[r.spec.name] = r.to(peer)
	}
	return told
}

// serve registers a region.
func (s regionSpec) serve(e *engine.Engine) (*served, error) {
	r := &served{spec: s}
	var seg driver.Segment
	var err error
	if s.path == "" {
		if r.memory,
			err = e.Alloc(s.size, engine.AllocOptions{Purpose: "region " + s.name}); err == nil {
			seg = r.memory.Segment()
		}
	} else {
		seg, err = r.openFile()
	}
	if err == nil && s.writers != nil {
		r.writable, err = e.RegisterPrivate(s.name+" for writers", seg)
		seg.ReadOnly = true
	}
	if err == nil {
		r.region, err = e.Register(s.name, seg)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("region %s: %w", s.name, err), r.free())
	}
	return r, nil
}

// openFile opens the file, read-only unless the command line says :rw.
func (r *served) openFile() (seg driver.Segment, err error) {
	s := &r.spec
	mode := os.O_RDONLY
	if seg.ReadOnly = !s.write; s.write {
		mode = os.O_RDWR
	}
	r.file, err = os.OpenFile(s.path, mode, 0)
	if errors.Is(err, os.ErrNotExist) {
		return seg, usagef("%q is neither a size, such as 1GiB, nor a file that is there: %w",
			s.path, err)
	}
	if err != nil {
		return seg, &usageError{err}
	}
	info, err := r.file.Stat()
	if err != nil {
		return seg, err
	}
	size := uint64(info.Size())
	switch {
	case !info.Mode().IsRegular() && s.n == 0:
		return seg, usagef("%s is no regular file: say its :OFFSET:LENGTH", s.path)
	case s.n == 0 && size == 0:
		return seg, usagef("%s is empty: make it as long as the region (truncate -s SIZE), which "+
			"does not grow", s.path)
	case s.n == 0:
		s.n = size
	case info.Mode().IsRegular() && (s.off > size || s.n > size-s.off):
		return seg, usagef("%s has %d bytes: %d at %d are past its end", s.path, size, s.n, s.off)
	}
	seg.Kind, seg.FD, seg.FileOff, seg.Len = driver.File, int(r.file.Fd()), s.off, s.n
	return seg, nil
}

// free gives memory and file back, once the engine is closed.
func (r *served) free() error {
	var errs []error
	if r.memory != nil {
		errs = append(errs, r.memory.Close())
	}
	if r.file != nil {
		errs = append(errs, r.file.Close())
	}
	return errors.Join(errs...)
}

func (r *served) String() string {
	access := ", read-only"
	switch {
	case r.spec.writers != nil:
		access = fmt.Sprintf(", %s alone may write to it", strings.Join(r.spec.writers, " and "))
	case r.spec.write:
		access = ", peers may write to it"
	}
	if r.spec.path == "" {
		if r.spec.writers == nil {
			access = ""
		}
		return fmt.Sprintf("%s: %s of memory%s", r.spec.name, bench.FormatSize(r.spec.size),
			access)
	}
	return fmt.Sprintf("%s: %s of %s at %d%s", r.spec.name, bench.FormatSize(r.spec.n), r.spec.path,
		r.spec.off, access)
}
