// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"maps"
	"sync"
)

var usage struct {
	sync.Mutex
	bytes map[string]uint64
}

// InUse returns the bytes that are allocated now, in whole pages, by purpose, those
// of Count among them. The map is the caller's.
func InUse() map[string]uint64 {
	usage.Lock()
	defer usage.Unlock()
	if usage.bytes == nil {
		return map[string]uint64{}
	}
	return maps.Clone(usage.bytes)
}

func count(purpose string, delta int64) {
	usage.Lock()
	defer usage.Unlock()
	if usage.bytes == nil {
		usage.bytes = map[string]uint64{}
	}
	name := purposeName(purpose)
	usage.bytes[name] += uint64(delta)
	if usage.bytes[name] == 0 {
		delete(usage.bytes, name)
	}
}

func purposeName(purpose string) string {
	if purpose == "" {
		return "unnamed"
	}
	return purpose
}
