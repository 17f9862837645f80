// SPDX-License-Identifier: Apache-2.0

// Package cache keeps KV blocks by their content, in memory that outlives the process.
package cache
