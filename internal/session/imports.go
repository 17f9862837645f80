// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Imports holds by key what a peer has accepted. A key that comes free is used again, the last
// first. The zero value is empty. Its caller holds a lock.
type Imports[R any] struct {
	list []*R // nil: free
	free []uint32
}

// Add returns a key for r. The error wraps driver.ErrFull.
func (i *Imports[R]) Add(r *R) (key uint32, err error) {
	if n := len(i.free); n > 0 {
		key, i.free = i.free[n-1], i.free[:n-1]
		i.list[key] = r
		return key, nil
	}
	if len(i.list) >= KeyLimit {
		return 0, fmt.Errorf("all %d keys are taken: %w", KeyLimit, driver.ErrFull)
	}
	i.list = append(i.list, r)
	return uint32(len(i.list) - 1), nil
}

// At returns what a key names, nil for nothing.
func (i *Imports[R]) At(key uint32) *R {
	if uint64(key) >= uint64(len(i.list)) {
		return nil
	}
	return i.list[key]
}

// Drop makes a key free and returns what it named, nil for nothing.
func (i *Imports[R]) Drop(key uint32) *R {
	r := i.At(key)
	if r != nil {
		i.list[key] = nil
		i.free = append(i.free, key)
	}
	return r
}

// Replace has a key name another one, if it still names r. It reports whether it does.
func (i *Imports[R]) Replace(key uint32, r, other *R) bool {
	if i.At(key) != r {
		return false
	}
	i.list[key] = other
	return true
}

// All lists what the keys name.
func (i *Imports[R]) All() (list []*R) {
	for _, r := range i.list {
		if r != nil {
			list = append(list, r)
		}
	}
	return list
}
