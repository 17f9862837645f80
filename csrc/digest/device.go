// SPDX-License-Identifier: Apache-2.0

package digest

// DeviceMemory is memory that the CPU does not read: an allocation of a device, or a part of one.
type DeviceMemory struct {
	Device    int // its ordinal
	Addr, Len uint64
}

// DeviceCells are cells in such memory, and the key that they are summed with. What sums them
// answers as Sum does.
type DeviceCells struct {
	Memory DeviceMemory
	Cells  Cells
	Key    *Key
}
