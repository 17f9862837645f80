// SPDX-License-Identifier: Apache-2.0

// Package nvml asks the NVIDIA driver which GPUs there are, with NVML, NVIDIA's management library.
// It opens the library at run time.
package nvml

import "github.com/sluicehq/sluice/driver"

// Library is the usual file name of NVML.
const Library = "libnvidia-ml.so.1"

// Findings are what the driver reports. What it does not report is empty or zero.
type Findings struct {
	Driver string // version of the driver, such as "550.54.15"
	CUDA   string // newest version of CUDA that the driver supports, such as "12.4"
	GPUs   []GPU  // in NVML's order, by PCI address
}

// GPU is one card. What the driver does not report is empty, zero or -1.
type GPU struct {
	Index   int    `json:"index"` // as nvidia-smi numbers them; CUDA may number them otherwise
	Name    string `json:"name"`
	Bus     string `json:"bus"`     // PCI address as in sysfs, "0000:3b:00.0"
	Compute string `json:"compute"` // compute capability, such as "9.0"
	Memory  uint64 `json:"memory_total"`
	MIG     string `json:"mig"`               // "enabled" or "disabled"; empty: the GPU has no MIG
	State   int    `json:"performance_state"` // from 0, full clocks, to 15; -1: not known
}

const installFix = "install the NVIDIA driver; containers: --gpus all"

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "nvml", Reason: reason, Fix: fix}
}
