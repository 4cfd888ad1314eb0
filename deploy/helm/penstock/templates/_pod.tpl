{{/* The pod's template. In a LeaderWorkerSet, .role is leader or worker. */}}
{{- define "penstock.pod" -}}
metadata:
  # Without the chart's version, so that a new version of the chart does not replace the pods by itself.
  labels:
    {{- include "penstock.selectorLabels" . | nindent 4 }}
    {{- with .role }}
    app.kubernetes.io/component: {{ . }}
    {{- end }}
    {{- with .Values.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if ne .role "worker" }}
    {{- with .Values.llmd.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: penstock
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # Otherwise a Service named penstock sets PENSTOCK_PORT, and one named penstock-serve sets PENSTOCK_SERVE_PORT.
  enableServiceLinks: false
  automountServiceAccountToken: false
  {{- with .Values.serviceAccount.name }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if ne .role "worker" }}
  terminationGracePeriodSeconds: {{ include "penstock.terminationGracePeriodSeconds" . }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    {{- if eq .role "worker" }}
    {{- include "penstock.worker" . | nindent 4 }}
    {{- else }}
    {{- include "penstock.serve" . | nindent 4 }}
    {{- if and .Values.http.enabled .Values.http.container.enabled }}
    {{- include "penstock.gateway" . | nindent 4 }}
    {{- end }}
    {{- end }}
  volumes:
    {{- include "penstock.volumes" . | nindent 4 }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "penstock.selectorLabels" $ | fromYaml)) }}
    - {{- mergeOverwrite $own . | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{- define "penstock.serve" -}}
- name: penstock
  image: {{ include "penstock.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [penstock, serve]
  {{- with .Values.extraArgs }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    {{- include "penstock.serveEnv" . | nindent 4 }}
  ports:
    - {name: grpc, containerPort: {{ .Values.ports.grpc }}}
    - {name: metrics, containerPort: {{ .Values.ports.metrics }}}
    {{- if and .Values.http.enabled (not .Values.http.container.enabled) }}
    - {name: http, containerPort: {{ .Values.http.port }}}
    {{- end }}
    {{- if .role }}
    - {name: join, containerPort: {{ .Values.hosts.port }}}
    {{- end }}
  # The gRPC listener opens when the model is loaded; /readyz reports the same.
  startupProbe:
    {{- include "penstock.probe" (list . "startup" "penstock.live" "/readyz") | nindent 4 }}
  readinessProbe:
    {{- include "penstock.probe" (list . "readiness" "" "/readyz") | nindent 4 }}
  # The process itself: a worker that dies is replaced without a restart of the pod.
  livenessProbe:
    {{- include "penstock.probe" (list . "liveness" "penstock.live" "/livez") | nindent 4 }}
  {{- with .Values.shutdown.preStop }}
  {{- if .enabled }}
  {{- $key := ternary " --api-key-file /etc/penstock/operator/key" "" (ne "" .operatorKey.secret) }}
  lifecycle:
    preStop:
      exec:
        # First the balancers need time to notice that the pod is going away.
        command:
          - sh
          - -c
          - {{ printf "sleep %d; timeout %d penstock drain --wait%s" (int $.Values.shutdown.drainDelaySeconds) (int .waitSeconds) $key | quote }}
  {{- end }}
  {{- end }}
  resources:
    {{- include "penstock.resources" . | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "penstock.mounts" . | nindent 4 }}
    {{- if .Values.tls.secret }}
    - {name: tls, mountPath: /etc/penstock/tls, readOnly: true}
    {{- end }}
    {{- if include "penstock.apiKeysSecret" . }}
    - {name: api-keys, mountPath: /etc/penstock/keys, readOnly: true}
    {{- end }}
    {{- if include "penstock.tenantsSecret" . }}
    - {name: tenants, mountPath: /etc/penstock/tenants, readOnly: true}
    {{- end }}
    {{- if include "penstock.operatorSecret" . }}
    - {name: operator, mountPath: /etc/penstock/operator, readOnly: true}
    {{- end }}
{{- end -}}

{{/* The volumes of every container that runs the model. */}}
{{- define "penstock.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
- {name: models, mountPath: /models}
{{- if .Values.shm.sizeLimit }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .role }}
- {name: join, mountPath: /etc/penstock/join, readOnly: true}
{{- if .Values.hosts.tls.secret }}
- {name: join-tls, mountPath: /etc/penstock/join-tls, readOnly: true}
{{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The variables of every container that runs the model. */}}
{{- define "penstock.modelEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# The root file system is read-only, and the user has no entry in /etc/passwd.
- {name: HOME, value: /tmp}
- {name: USER, value: penstock}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: HF_HOME, value: /models}
{{- if .Values.model.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.hfToken }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.serveEnv" -}}
{{ include "penstock.modelEnv" . }}
# For `penstock top` and other tools in the container.
- {name: PENSTOCK_ADMIN, value: {{ include "penstock.adminAddress" . | quote }}}
- {name: PENSTOCK_SERVE_MODEL, value: {{ .Values.model.name | quote }}}
{{- with .Values.model.revision }}
- {name: PENSTOCK_SERVE_REVISION, value: {{ . | quote }}}
{{- end }}
- {name: PENSTOCK_SERVE_HOST, value: {{ .Values.host | quote }}}
- {name: PENSTOCK_SERVE_PORT, value: {{ .Values.ports.grpc | toJson | quote }}}
- {name: PENSTOCK_SERVE_ADMIN_LISTEN, value: {{ include "penstock.adminAddress" . | quote }}}
# In brackets, because the pod's address may be IPv6.
- {name: PENSTOCK_SERVE_METRICS_LISTEN, value: "[$(POD_IP)]:{{ .Values.ports.metrics }}"}
- {name: PENSTOCK_SERVE_ALLOWED_HOSTS, value: {{ include "penstock.allowedHosts" . | quote }}}
{{- if and .Values.http.enabled (not .Values.http.container.enabled) }}
- {name: PENSTOCK_SERVE_HTTP_PORT, value: {{ .Values.http.port | toJson | quote }}}
- {name: PENSTOCK_SERVE_HTTP_HOST, value: {{ .Values.host | quote }}}
{{- with .Values.http.allowedOrigins }}
- {name: PENSTOCK_SERVE_ALLOWED_ORIGINS, value: {{ join "," . | quote }}}
{{- end }}
{{- end }}
{{- if .Values.tls.secret }}
- {name: PENSTOCK_SERVE_TLS_CERT, value: /etc/penstock/tls/tls.crt}
- {name: PENSTOCK_SERVE_TLS_KEY, value: /etc/penstock/tls/tls.key}
{{- if .Values.tls.clientCA }}
- {name: PENSTOCK_SERVE_TLS_CLIENT_CA, value: /etc/penstock/tls/ca.crt}
{{- end }}
{{- end }}
{{- if include "penstock.apiKeysSecret" . }}
- {name: PENSTOCK_SERVE_API_KEYS_FILE, value: /etc/penstock/keys/keys}
{{- end }}
{{- if include "penstock.tenantsSecret" . }}
- {name: PENSTOCK_SERVE_TENANTS_FILE, value: /etc/penstock/tenants/tenants.yaml}
{{- end }}
- {name: PENSTOCK_SERVE_DRAIN_DELAY, value: {{ .Values.shutdown.drainDelaySeconds | toJson | quote }}}
- {name: PENSTOCK_SERVE_SHUTDOWN_GRACE, value: {{ .Values.shutdown.graceSeconds | toJson | quote }}}
{{- if .role }}
{{ include "penstock.leaderEnv" . }}
{{- else if and (gt (int .Values.gpu.count) 1) (not (hasKey .Values.flags "tensor-parallel-size")) }}
- {name: PENSTOCK_SERVE_TENSOR_PARALLEL_SIZE, value: {{ .Values.gpu.count | toJson | quote }}}
{{- end }}
{{- range $name, $value := .Values.flags }}
- name: PENSTOCK_SERVE_{{ $name | replace "-" "_" | upper }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes the root, the name of the probe, the service of grpc.health.v1, and the path on the metrics listener. */}}
{{- define "penstock.probe" -}}
{{- $root := index . 0 -}}
{{- $service := index . 2 -}}
{{- if $root.Values.tls.secret -}}
# Kubernetes' gRPC probes do not support TLS. The metrics listener has none.
httpGet: {path: {{ index . 3 }}, port: metrics}
{{- else -}}
grpc:
  port: {{ $root.Values.ports.grpc }}
  {{- with $service }}
  service: {{ . }}
  {{- end }}
{{- end }}
{{ index $root.Values.probes (index . 1) | toYaml }}
{{- end -}}

{{- define "penstock.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.count -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.gpu.resource .Values.gpu.count)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "penstock.gateway" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne "" .Values.tls.secret) -}}
- name: gateway
  image: {{ include "penstock.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [penstock, gateway]
  args:
    - --target=127.0.0.1:{{ .Values.ports.grpc }}
    - --host={{ .Values.host }}
    - --port={{ .Values.http.port }}
    - --metrics-target=[$(POD_IP)]:{{ .Values.ports.metrics }}
    - --allowed-hosts={{ include "penstock.allowedHosts" . }}
    - --shutdown-grace={{ include "penstock.gatewayGraceSeconds" . }}
    {{- with .Values.http.allowedOrigins }}
    - --allowed-origins={{ join "," . }}
    {{- end }}
    {{- if .Values.tls.secret }}
    - --tls-ca=/etc/penstock/tls/ca.crt
    - --tls-server-name={{ .Values.tls.serverName }}
    - --http-tls-cert=/etc/penstock/tls/tls.crt
    - --http-tls-key=/etc/penstock/tls/tls.key
    {{- end }}
    {{- with .Values.http.container.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - {name: HOME, value: /tmp}
  ports:
    - {name: http, containerPort: {{ .Values.http.port }}}
  readinessProbe:
    httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
    {{- toYaml .Values.probes.readiness | nindent 4 }}
  livenessProbe:
    httpGet: {path: /version, port: http, scheme: {{ $scheme }}}
    {{- toYaml .Values.probes.liveness | nindent 4 }}
  lifecycle:
    preStop:
      exec:
        # At SIGTERM the gateway refuses connections immediately, so it waits until no balancer selects the pod.
        command: [sleep, {{ .Values.shutdown.drainDelaySeconds | toJson | quote }}]
  resources:
    {{- toYaml .Values.http.container.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if .Values.tls.secret }}
    - {name: tls, mountPath: /etc/penstock/tls, readOnly: true}
    {{- end }}
{{- end -}}

{{- define "penstock.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .Values.tmp.sizeLimit }}}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.tmp.sizeLimit }}}
{{- if .Values.modelCache.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelCache.existingClaim }}}
{{- else if not .Values.modelCache.persistence.enabled }}
- name: models
  emptyDir: {sizeLimit: {{ .Values.modelCache.sizeLimit }}}
{{- end }}
{{- with .Values.shm.sizeLimit }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- if .role }}
{{ include "penstock.joinVolumes" . }}
{{- end }}
{{- if ne .role "worker" }}
{{- if .Values.tls.secret }}
- name: tls
  secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 0440}
{{- end }}
{{- with include "penstock.apiKeysSecret" . }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.apiKeys.key }}, path: keys}]
{{- end }}
{{- with include "penstock.tenantsSecret" . }}
- name: tenants
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.tenants.key }}, path: tenants.yaml}]
{{- end }}
{{- with include "penstock.operatorSecret" . }}
- name: operator
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.shutdown.preStop.operatorKey.key }}, path: key}]
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* One volume for each pod. */}}
{{- define "penstock.volumeClaims" -}}
{{- with .Values.modelCache.persistence -}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: models
    {{- with .annotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    accessModes: {{ toJson .accessModes }}
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .size }}}}
{{- end }}
{{- end -}}
